"""Øland & Raj (2015): their figures, and the two ratios of section 5.

The network is the paper's; the images are a part of MNIST's, or of Fashion-MNIST's where MNIST is not installed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from thinwire.jobs.tables import Table
from thinwire.studies.charts import Chart, Panel, Series
from thinwire.studies.reproduce.averages import (
    FLOATS,
    HISTOGRAM_BITS,
    SHARES,
    AveragesCell,
    AveragesFinding,
    train,
)
from thinwire.studies.reproduce.entry import Entry, Scale, Shown, Study
from thinwire.workloads.data import datasets

Found = Mapping[AveragesCell, AveragesFinding]

SCALED = (
    "The paper: MNIST, 60,000 images, 100 epochs, 5 workers, about 1,500 runs. Rates, batch and penalty, which it does "
    "not print, are ours. Fewer images give a lower accuracy with more noise; Fashion-MNIST's pixels are seldom black "
    "in all images, so that fewer weights fall to zero and the bins' entropy is higher than MNIST's."
)
_EXAMPLES: dict[Scale, int] = {"tiny": 200, "quick": 2000, "full": 10000}
_EPOCHS: dict[Scale, int] = {"tiny": 3, "quick": 40, "full": 100}
_SEEDS: dict[Scale, int] = {"tiny": 1, "quick": 2, "full": 10}
_BITS: dict[Scale, Sequence[int]] = {
    "tiny": (2, 8),
    "quick": (2, 4, 6, 8, 10, 16, 30),
    "full": range(2, 31),
}
_CEILING = 10
_FLOORS: dict[Scale, Sequence[int]] = {"tiny": (6, 10), "quick": (2, 4, 5, 6, 7, 8, 10), "full": range(2, 11)}
_HISTOGRAM = 4
_OF_FOUR: dict[Scale, Sequence[int]] = {"tiny": (5, 6), "quick": range(3, 9), "full": range(1, 11)}
_LAYERS = ("784 × 392", "392 × 50", "50 × 10")

# Of section 5: raw bits, bits after Huffman's code, ratio.
_PRINTED = {5: (6.8, 3.55, 9.01), 6: (None, 3.78, 8.47)}


def _cells(designs: Sequence[str], scale: Scale, *, probes: bool = False) -> list[AveragesCell]:
    present = [info.name for info in datasets() if info.name in ("mnist", "fashion-mnist") and info.present]
    name = "digits" if scale == "tiny" or not present else "mnist" if "mnist" in present else "fashion-mnist"
    workers, batch, examples = (2, 10, _EXAMPLES["tiny"]) if name == "digits" else (5, 20, _EXAMPLES[scale])
    test = 200 if name == "digits" else 2000
    return [
        AveragesCell(
            design=design,
            data=f"{name}[train={examples},test={test},unit=true]",
            workers=workers,
            epochs=_EPOCHS[scale],
            steps_per_epoch=examples // workers // batch,
            batch=batch,
            seed=seed,
            probes=probes,
        )
        for seed in range(1 if probes else _SEEDS[scale])
        for design in designs
    ]


def fixed(bits: int) -> str:
    """Returns the design of so many bits for every weight."""
    return f"entropy[mode=fixed,bits={bits}]"


def adaptive(floor: int, histogram_bits: int = _HISTOGRAM, rounding: str = "ceil") -> str:
    """Returns the design of N = H + c, c the floor, H of 2**M bins."""
    return f"entropy[c={floor},histogram_bits={histogram_bits},rounding={rounding}]"


def _setting(found: Found) -> str:
    first = next(iter(found))
    seeds = len({cell.seed for cell in found})
    return (
        f"784-392-50-10 with tanh on {first.data}, {first.workers} workers of {first.batch} examples, {first.epochs} "
        f"epochs, weights averaged after each, half the squared error, ℓ1 of {first.job().recipe().l1:g}, exponential "
        f"decay of the rate, "
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}. Accuracy is the mean of the last tenth of the epochs."
    )


def _of(found: Found, design: str, figure: Callable[[AveragesFinding], float]) -> list[float]:
    return [figure(finding) for cell, finding in found.items() if cell.design == design]


def _accuracy(finding: AveragesFinding) -> float:
    return 100 * finding.accuracy


def _bits(finding: AveragesFinding) -> float:
    return statistics.fmean(finding.coded)


def _raw(finding: AveragesFinding) -> float:
    return statistics.fmean(finding.raw)


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _line(found: Found, label: str, x: Sequence[float], designs: Sequence[str], figure: Callable[..., float]) -> Series:
    each = [_of(found, design, figure) for design in designs]
    return Series(label=label, x=x, y=[statistics.fmean(v) for v in each], error=[_spread(v) for v in each])


def _show_figure_1(found: Found) -> Shown:
    designs = {cell.design: int(cell.design.split("=")[-1].rstrip("]")) for cell in found if cell.design != FLOATS}
    floats = statistics.fmean(_of(found, FLOATS, _accuracy))
    x = list(designs.values())
    medians = [statistics.median(_of(found, design, _accuracy)) for design in designs]
    series = [
        _line(found, "mean ± standard deviation", x, list(designs), _accuracy),
        Series(label="median", x=x, y=medians),
        Series(label="float", x=[min(x), max(x)], y=[floats, floats]),
    ]
    lines = []
    for design, bits in designs.items():
        values = _of(found, design, _accuracy)
        mean, remark = statistics.fmean(values), "baseline recovered (§5.1)" if bits == 8 else ""
        median = f"{statistics.median(values):.2f}"
        lines.append([str(bits), f"{mean:.2f} ± {_spread(values):.2f}", median, f"{mean - floats:+.2f}", remark])
    panel = Panel(title="", x_label="bits a weight", y_label="test accuracy (%)", series=series)
    return Shown(
        setting=_setting(found),
        tables=[Table(["bits", "accuracy %", "median %", f"against float, {floats:.2f} %", "paper"], lines)],
        charts=[Chart(name="entropy-figure-1", caption="Accuracy by bits of every weight.", panels=[panel])],
        notes=["The paper prints no accuracies; it recovers the baseline at 8 bits, and loses below."],
    )


def _probed(found: Found) -> AveragesFinding:
    return next(finding for cell, finding in found.items() if cell.probes)


def _epochs(values: Sequence[object]) -> list[float]:
    return [float(epoch) for epoch in range(1, len(values) + 1)]


def _show_figure_2(found: Found) -> Shown:
    rms = _probed(found).rms
    series = [
        Series(label=name, x=_epochs(rms), y=[epoch[layer] for epoch in rms]) for layer, name in enumerate(_LAYERS)
    ]
    panel = Panel(title="", x_label="epoch", y_label="RMS of the derivative", series=series, y_log=True)
    lines = [[name, *(f"{epoch[layer]:.2e}" for epoch in (rms[0], rms[-1]))] for layer, name in enumerate(_LAYERS)]
    falling = [name for layer, name in enumerate(_LAYERS) if rms[-1][layer] < rms[0][layer]]
    return Shown(
        setting=_setting(found),
        tables=[Table(["layer", "first epoch", "last epoch"], lines)],
        charts=[Chart(name="entropy-figure-2", caption="Derivative of the loss by layer.", panels=[panel])],
        notes=[
            "The paper: derivatives are larger at higher layers and fall with the epochs. Here those of "
            f"{', '.join(falling) or 'no layer'} have fallen by the last epoch; they are of batches of "
            f"{next(iter(found)).batch}, whose noise does not fall. The paper scales the third layer by 20 to fit; "
            "here the axis is logarithmic."
        ],
    )


def _show_figure_3(found: Found) -> Shown:
    probed = _probed(found)
    entropies = np.array(probed.entropies)  # epoch, layer, bits, share
    x = _epochs(probed.entropies)
    panels = [
        Panel(
            title=f"{bits} bits",
            x_label="epoch",
            y_label="entropy (bits)",
            series=[
                Series(label=f"{name}, {share:g}", x=x, y=entropies[:, layer, index, SHARES.index(share)].tolist())
                for layer, name in enumerate(_LAYERS)
                for share in (1.0, 0.03)
            ],
        )
        for index, bits in enumerate(HISTOGRAM_BITS)
    ]
    lines = []
    for layer, name in enumerate(_LAYERS):
        four = HISTOGRAM_BITS.index(_HISTOGRAM)
        off = np.abs(entropies[:, layer, four, 1:] - entropies[:, layer, four, :1]).mean(0)
        target = np.log2(np.array(probed.rms)[:, layer] + 1)
        whole = entropies[:, layer, four, 0]
        related = np.corrcoef(target, whole)[0, 1] if len(x) > 2 and target.std() > 0 and whole.std() > 0 else np.nan
        lines.append([name, *(f"{each:.3f}" for each in off), f"{related:.2f}", "> 0.75, often > 0.95"])
    shares = [f"{share:g}" for share in SHARES[1:]]
    return Shown(
        setting=_setting(found),
        tables=[
            Table(
                ["layer", *shares, "correlation with log(G + 1)", "paper"],
                lines,
                "Mean difference in bits between the entropy of a share of the weights and of all, 4-bit histogram",
            )
        ],
        charts=[
            Chart(
                name="entropy-figure-3",
                caption="Entropy by epoch, layer, and share of the weights, for four histograms.",
                panels=panels,
            )
        ],
        notes=[
            "A layer of fewer than 1,000 weights is always taken whole: 3 % of 500 weights are 15, which cannot show "
            "more than 3.9 bits."
        ],
    )


def _show_figure_4(found: Found) -> Shown:
    asked = {cell.design for cell in found}
    floats, peak = (statistics.fmean(_of(found, FLOATS, each)) for each in (_accuracy, lambda each: each.peak))
    groups = {
        f"ceiling {_CEILING}": {c: adaptive(c, _CEILING - c) for c in range(1, 11)},
        f"M = {_HISTOGRAM}": {c: adaptive(c) for c in range(1, 11)},
    }
    panels, lines = [], []
    for what, figure, base in (
        ("accuracy (%)", _accuracy, floats),
        ("epoch of the peak", lambda each: float(each.peak), peak),
    ):
        for title, designs in groups.items():
            mine = {c: design for c, design in designs.items() if design in asked}
            x = [float(c) for c in mine]
            line = _line(found, "mean", x, list(mine.values()), figure)
            dots = [statistics.median(_of(found, design, figure)) for design in mine.values()]
            series = [line, Series(label="median", x=x, y=dots), Series(label="float", x=x, y=[base] * len(x))]
            panels.append(Panel(title=title, x_label="floor c", y_label=what, series=series))
    for title, designs in groups.items():
        for c, design in designs.items():
            if design in asked:
                accuracy, peaks = _of(found, design, _accuracy), _of(found, design, lambda each: each.peak)
                lines.append(
                    [
                        f"{title}, c = {c}",
                        f"{statistics.fmean(accuracy):.2f} ± {_spread(accuracy):.2f}",
                        f"{statistics.fmean(accuracy) - floats:+.2f}",
                        *(f"{statistics.fmean(peaks):.1f}", f"{statistics.fmean(_of(found, design, _bits)):.2f}"),
                    ]
                )
    lines.append(["float", f"{floats:.2f}", "", f"{peak:.1f}", "32"])
    return Shown(
        setting=_setting(found),
        tables=[Table(["", "accuracy %", "against float", "epoch of the peak", "bits, coded"], lines)],
        charts=[Chart(name="entropy-figure-4", caption="Accuracy and convergence by floor.", panels=panels)],
        notes=[
            "The paper prints no numbers here but that c = 6 with M = 4 is better than the baseline and converges in "
            "20 % fewer iterations, and that c = 5 is just below. M = 0 is a histogram of one bin: N = c."
        ],
    )


def _show_figure_5(found: Found) -> Shown:
    panels, lines = [], []
    floats = statistics.fmean(_of(found, FLOATS, _accuracy))
    for c in (5, 6):
        finding = next(each for cell, each in found.items() if cell.design == adaptive(c))
        x = _epochs(finding.coded)
        series = [Series(label="raw", x=x, y=finding.raw), Series(label="Huffman", x=x, y=finding.coded)]
        panels.append(Panel(title=f"c = {c}, M = 4", x_label="epoch", y_label="bits a weight", series=series))
        raw, coded, ratio = _PRINTED[c]
        for rounding in ("ceil", "round"):
            design = adaptive(c, rounding=rounding)
            ours = statistics.fmean(_of(found, design, _bits))
            accuracy = statistics.fmean(_of(found, design, _accuracy)) - floats
            lines.append(
                [
                    f"c = {c}, N = {rounding}(H + c)",
                    *("–" if raw is None else f"{raw}", f"{statistics.fmean(_of(found, design, _raw)):.2f}"),
                    *(f"{coded}", f"{ours:.2f}", f"{ratio}×", f"{32 / ours:.2f}×", f"{accuracy:+.2f}"),
                ]
            )
    rms = statistics.fmean(_of(found, _RMS, _bits))
    accuracy = statistics.fmean(_of(found, _RMS, _accuracy)) - floats
    raw_rms = statistics.fmean(_of(found, _RMS, _raw))
    lines.append(["N = log(G + 1) + 8 (§3.2)", "–", f"{raw_rms:.2f}", "–", f"{rms:.2f}", "–", f"{32 / rms:.2f}×"])
    lines[-1].append(f"{accuracy:+.2f}")
    header = ["", "raw bits, paper", "ours", "coded, paper", "ours", "ratio, paper", "ours", "points against float"]
    return Shown(
        setting=_setting(found),
        tables=[Table(header, lines, "Bits a weight, mean over all epochs")],
        charts=[
            Chart(name="entropy-figure-5", caption="Bits a weight by epoch, before and after coding.", panels=panels)
        ],
        notes=[
            "N = H + c is a real number and the paper does not say how it is rounded; 6.8 raw bits at c = 5 are a mean "
            "entropy of 1.8 without rounding up. The last row follows the derivative itself, which is small beside 1: "
            "its bits are nearly the floor."
        ],
    )


_RMS = "entropy[mode=rms,c=8]"


def _study(
    designs: Callable[[Scale], Sequence[str]], show: Callable[[Found], Shown], *, probes: bool = False
) -> Study[AveragesCell, AveragesFinding]:
    return Study(
        cells=lambda scale: _cells(designs(scale), scale, probes=probes),
        run=train,
        show=show,
        finding=AveragesFinding,
    )


def _figure_4_designs(scale: Scale) -> list[str]:
    ceiling = [adaptive(c, _CEILING - c) for c in _FLOORS[scale]]
    return list(dict.fromkeys([FLOATS, *ceiling, *map(adaptive, _OF_FOUR[scale])]))


_FIGURE_5 = [FLOATS, _RMS, *(adaptive(c, rounding=rounding) for c in (5, 6) for rounding in ("ceil", "round"))]
_PROBED = [adaptive(6)]


def _entry(item: str, shows: str, minutes: float, study: Study[AveragesCell, AveragesFinding]) -> Entry:
    return Entry(paper="entropy", item=item, shows=shows, status="scaled", why=SCALED, minutes=minutes, study=study)


ENTRIES = (
    _entry(
        "figure-1",
        "accuracy by quantisation bits, 2 to 30",
        3,
        _study(lambda scale: [FLOATS, *map(fixed, _BITS[scale])], _show_figure_1),
    ),
    _entry(
        "figure-2",
        "RMS of the derivative by epoch and layer",
        1,
        _study(lambda scale: _PROBED, _show_figure_2, probes=True),
    ),
    _entry(
        "figure-3",
        "entropy of the weights by sample ratio and bins",
        1,
        _study(lambda scale: _PROBED, _show_figure_3, probes=True),
    ),
    _entry("figure-4", "accuracy and convergence by ceiling and floor", 4, _study(_figure_4_designs, _show_figure_4)),
    _entry(
        "figure-5",
        "bits by epoch, raw and Huffman; the 9.0 and 8.5 times",
        2,
        _study(lambda scale: _FIGURE_5, _show_figure_5),
    ),
)
