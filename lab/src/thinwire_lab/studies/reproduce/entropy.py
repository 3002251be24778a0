"""Øland & Raj (2015), figures 1 to 4; figure 5, with the two ratios of section 5, is in `entropy_ratios.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from thinwire.codecs.entropy import MIN_SAMPLE
from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.studies.deviation import spread
from thinwire_lab.studies.reproduce import entropy_ratios
from thinwire_lab.studies.reproduce.averages import (
    FLOATS,
    HISTOGRAM_BITS,
    SHARES,
    AveragesCell,
    AveragesFinding,
    sample_size,
)
from thinwire_lab.studies.reproduce.entropy_cells import (
    HISTOGRAM,
    SCALED,
    Found,
    adaptive,
    cells,
    coded_bits,
    epochs,
    fixed,
    mean_line,
    of,
    percent,
    setting,
    widths,
)
from thinwire_lab.studies.reproduce.entry import Scale, Shown, Study, scaled

_BITS: dict[Scale, Sequence[int]] = {
    "tiny": (2, 8),
    "quick": (2, 4, 6, 8, 10, 16, 30),
    "full": range(2, 31),
}
_CEILING = 10
_FLOORS: dict[Scale, Sequence[int]] = {"tiny": (6, 10), "quick": (2, 4, 5, 6, 7, 8, 10), "full": range(2, 11)}
_OF_FOUR: dict[Scale, Sequence[int]] = {"tiny": (5, 6), "quick": range(3, 9), "full": range(1, 11)}


def _show_figure_1(found: Found) -> Shown:
    designs = {cell.design: int(cell.design.split("=")[-1].rstrip("]")) for cell in found if cell.design != FLOATS}
    floats = statistics.fmean(of(found, FLOATS, percent))
    x = list(designs.values())
    medians = [statistics.median(of(found, design, percent)) for design in designs]
    series = [
        mean_line(found, x, list(designs), percent),
        Series(label="median", x=x, y=medians),
        Series(label="float", x=[min(x), max(x)], y=[floats, floats]),
    ]
    lines = []
    for design, bits in designs.items():
        values = of(found, design, percent)
        mean, remark = statistics.fmean(values), "baseline recovered (§5.1)" if bits == 8 else ""
        median = f"{statistics.median(values):.2f}"
        lines.append([str(bits), f"{mean:.2f}{spread(values, 2)}", median, f"{mean - floats:+.2f}", remark])
    panel = Panel(title="", x_label="bits a weight", y_label="test accuracy (%)", series=series)
    return Shown(
        setting=setting(found),
        tables=[Table(["bits", "accuracy %", "median %", f"against float, {floats:.2f} %", "paper"], lines)],
        charts=[Chart(name="entropy-figure-1", caption="Accuracy by bits of every weight.", panels=[panel])],
        notes=["The paper prints no accuracies; it recovers the baseline at 8 bits, and loses below."],
    )


def _layers(found: Found) -> dict[str, int]:
    """Returns the layers' names, and how many weights each has."""
    return {f"{wide} × {narrow}": wide * narrow for wide, narrow in pairwise(widths(found))}


def _probed(found: Found) -> AveragesFinding:
    return next(finding for cell, finding in found.items() if cell.probes)


def _show_figure_2(found: Found) -> Shown:
    rms, layers = _probed(found).rms, _layers(found)
    series = [Series(label=name, x=epochs(rms), y=[epoch[layer] for epoch in rms]) for layer, name in enumerate(layers)]
    panel = Panel(title="", x_label="epoch", y_label="RMS of the derivative", series=series, y_log=True)
    lines = [[name, *(f"{epoch[layer]:.2e}" for epoch in (rms[0], rms[-1]))] for layer, name in enumerate(layers)]
    falling = [name for layer, name in enumerate(layers) if rms[-1][layer] < rms[0][layer]]
    return Shown(
        setting=setting(found),
        tables=[Table(["layer", "first epoch", "last epoch"], lines)],
        charts=[Chart(name="entropy-figure-2", caption="Derivative of the loss by layer.", panels=[panel])],
        notes=[
            "The paper: derivatives are larger at higher layers and fall with the epochs. Here those of "
            f"{', '.join(falling) or 'no layer'} have fallen by the last epoch; they are of batches of "
            f"{next(iter(found)).batch}, whose noise does not fall, and hold that of the ℓ1 penalty. The paper scales "
            "the third layer by 20 to fit; here the axis is logarithmic."
        ],
    )


def _show_figure_3(found: Found) -> Shown:
    probed = _probed(found)
    entropies = np.array(probed.entropies)  # epoch, layer, bits, share
    x, layers = epochs(probed.entropies), _layers(found)
    panels = [
        Panel(
            title=f"{bits} bits",
            x_label="epoch",
            y_label="entropy (bits)",
            series=[
                Series(
                    label=f"{name}, {_sampled(numel, share):.2g}",
                    x=x,
                    y=entropies[:, layer, index, SHARES.index(share)].tolist(),
                )
                for layer, (name, numel) in enumerate(layers.items())
                for share in (1.0, 0.03)
                if share == 1 or _sampled(numel, share) < 1
            ],
        )
        for index, bits in enumerate(HISTOGRAM_BITS)
    ]
    lines = []
    for layer, (name, numel) in enumerate(layers.items()):
        four = HISTOGRAM_BITS.index(HISTOGRAM)
        off = np.abs(entropies[:, layer, four, 1:] - entropies[:, layer, four, :1]).mean(0)
        target = np.log2(np.array(probed.rms)[:, layer] + 1)
        whole = entropies[:, layer, four, 0]
        related = np.corrcoef(target, whole)[0, 1] if len(x) > 2 and target.std() > 0 and whole.std() > 0 else np.nan
        offs = [f"{each:.3f}{_instead(numel, share)}" for each, share in zip(off, SHARES[1:], strict=True)]
        lines.append([name, *offs, f"{related:.2f}", "> 0.75, often > 0.95"])
    shares = [f"{share:g}" for share in SHARES[1:]]
    return Shown(
        setting=setting(found),
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
            f"At least {MIN_SAMPLE:,} weights are taken, or a layer whole: 3 % of 500 weights are 15, which cannot "
            "show more than 3.9 bits. In brackets is the share that was taken where it is another one.",
            "Weights are those of the average that worker 0 has after an epoch's exchange, and not what it sent.",
        ],
    )


def _sampled(numel: int, share: float) -> float:
    """Returns the share of a layer's weights that is taken for a share of them."""
    return sample_size(numel, share) / numel


def _instead(numel: int, share: float) -> str:
    taken = _sampled(numel, share)
    return f" ({taken:.1%})" if taken > 1.01 * share else ""


def _show_figure_4(found: Found) -> Shown:
    asked = {cell.design for cell in found}
    floats, peak = (statistics.fmean(of(found, FLOATS, each)) for each in (percent, lambda each: each.peak))
    groups = {
        f"ceiling {_CEILING}": {c: adaptive(c, _CEILING - c) for c in range(1, 11)},
        f"M = {HISTOGRAM}": {c: adaptive(c) for c in range(1, 11)},
    }
    panels, lines = [], []
    for what, figure, base in (
        ("accuracy (%)", percent, floats),
        ("epoch of the peak", lambda each: float(each.peak), peak),
    ):
        for title, designs in groups.items():
            mine = {c: design for c, design in designs.items() if design in asked}
            x = [float(c) for c in mine]
            line = mean_line(found, x, list(mine.values()), figure)
            dots = [statistics.median(of(found, design, figure)) for design in mine.values()]
            series = [line, Series(label="median", x=x, y=dots), Series(label="float", x=x, y=[base] * len(x))]
            panels.append(Panel(title=title, x_label="floor c", y_label=what, series=series))
    for title, designs in groups.items():
        for c, design in designs.items():
            if design in asked:
                accuracy, peaks = of(found, design, percent), of(found, design, lambda each: each.peak)
                lines.append(
                    [
                        f"{title}, c = {c}",
                        f"{statistics.fmean(accuracy):.2f}{spread(accuracy, 2)}",
                        f"{statistics.fmean(accuracy) - floats:+.2f}",
                        *(f"{statistics.fmean(peaks):.1f}", f"{statistics.fmean(of(found, design, coded_bits)):.2f}"),
                    ]
                )
    lines.append(["float", f"{floats:.2f}", "", f"{peak:.1f}", "32"])
    return Shown(
        setting=setting(found),
        tables=[Table(["", "accuracy %", "against float", "epoch of the peak", "bits, coded"], lines)],
        charts=[Chart(name="entropy-figure-4", caption="Accuracy and convergence by floor.", panels=panels)],
        notes=[
            "The paper prints no numbers here but that c = 6 with M = 4 is better than the baseline and converges in "
            "20 % fewer iterations, and that c = 5 is just below. M = 0 is a histogram of one bin: N = c."
        ],
    )


def _study(
    designs: Callable[[Scale], Sequence[str]], show: Callable[[Found], Shown], *, probes: bool = False
) -> Study[AveragesCell, AveragesFinding]:
    return Study(cells=lambda scale: cells(designs(scale), scale, probes=probes), show=show)


def _figure_4_designs(scale: Scale) -> list[str]:
    ceiling = [adaptive(c, _CEILING - c) for c in _FLOORS[scale]]
    return list(dict.fromkeys([FLOATS, *ceiling, *map(adaptive, _OF_FOUR[scale])]))


_PROBED = [adaptive(6)]


_entry = scaled("entropy", SCALED)
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
    entropy_ratios.ENTRY,
)
