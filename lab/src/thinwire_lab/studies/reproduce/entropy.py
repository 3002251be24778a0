"""Øland & Raj (2015): figures 1 to 5, the last with the two ratios of section 5."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from thinwire.codecs.entropy import MIN_SAMPLE
from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.studies.deviation import spread
from thinwire_lab.studies.reproduce.averages import (
    FLOATS,
    HISTOGRAM_BITS,
    SHARES,
    AveragesCell,
    AveragesFinding,
    Exchange,
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
    raw_bits,
    setting,
    widths,
)
from thinwire_lab.studies.reproduce.entry import Scale, Shown, chart, scaled

_BITS: dict[Scale, Sequence[int]] = {"tiny": (2, 8), "quick": (2, 4, 6, 8, 10, 16, 30), "full": range(2, 31)}
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
    axes = "bits a weight", "test accuracy (%)"
    return Shown(
        setting=setting(found),
        tables=[Table(["bits", "accuracy %", "median %", f"against float, {floats:.2f} %", "paper"], lines)],
        charts=[chart("entropy-figure-1", "Accuracy by bits of every weight.", series, *axes)],
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
    axes = "epoch", "RMS of the derivative"
    lines = [[name, *(f"{epoch[layer]:.2e}" for epoch in (rms[0], rms[-1]))] for layer, name in enumerate(layers)]
    return Shown(
        setting=setting(found),
        tables=[Table(["layer", "first epoch", "last epoch"], lines)],
        charts=[chart("entropy-figure-2", "Derivative of the loss by layer.", series, *axes, y_log=True)],
        notes=[
            "The paper: derivatives are larger at higher layers and fall with the epochs. Ours are of batches, whose "
            "noise does not fall, and contain the ℓ1 penalty's."
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
        charts=[Chart(name="entropy-figure-3", caption="Entropy by epoch, for four histograms.", panels=panels)],
        notes=[
            f"At least {MIN_SAMPLE:,} weights are taken, or the whole layer; brackets have the share where it differs. "
            "Weights are those of the average after an epoch's exchange."
        ],
    )


def _sampled(numel: int, share: float) -> float:
    """Returns the share of a layer's weights that is taken for a share of them."""
    return sample_size(numel, share) / numel


def _instead(numel: int, share: float) -> str:
    taken = _sampled(numel, share)
    return f" ({taken:.1%})" if taken > 1.01 * share else ""


def _peak(finding: AveragesFinding) -> float:
    return float(finding.peak)


def _show_figure_4(found: Found) -> Shown:
    asked = {cell.design for cell in found}
    floats, peak = (statistics.fmean(of(found, FLOATS, each)) for each in (percent, _peak))
    groups = {
        f"ceiling {_CEILING}": {c: adaptive(c, _CEILING - c) for c in range(1, 11)},
        f"M = {HISTOGRAM}": {c: adaptive(c) for c in range(1, 11)},
    }
    panels, lines = [], []
    for what, figure, base in (("accuracy (%)", percent, floats), ("epoch of the peak", _peak, peak)):
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
                accuracy = of(found, design, percent)
                mean = statistics.fmean(accuracy)
                peaks, bits = (statistics.fmean(of(found, design, each)) for each in (_peak, coded_bits))
                texts = f"{mean:.2f}{spread(accuracy, 2)}", f"{mean - floats:+.2f}", f"{peaks:.1f}", f"{bits:.2f}"
                lines.append([f"{title}, c = {c}", *texts])
    lines.append(["float", f"{floats:.2f}", "", f"{peak:.1f}", "32"])
    return Shown(
        setting=setting(found),
        tables=[Table(["", "accuracy %", "against float", "epoch of the peak", "bits, coded"], lines)],
        charts=[Chart(name="entropy-figure-4", caption="Accuracy and convergence by floor.", panels=panels)],
        notes=[
            "The paper: c = 6 with M = 4 is better than the baseline and converges in 20 % fewer iterations; c = 5 is "
            "just below. M = 0 is a histogram of one bin: N = c."
        ],
    )


def _figure_4_cells(scale: Scale) -> list[AveragesCell]:
    ceiling = [adaptive(c, _CEILING - c) for c in _FLOORS[scale]]
    return cells(list(dict.fromkeys([FLOATS, *ceiling, *map(adaptive, _OF_FOUR[scale])])), scale)


# Of section 5: raw bits, bits after Huffman's code, ratio.
_PRINTED = {5: (6.8, 3.55, 9.01), 6: (None, 3.78, 8.47)}
_RMS = "entropy[mode=rms,c=8]"
_ROUNDINGS = ("ceil", "round")
_ADAPTIVE = [adaptive(c, rounding=rounding) for c in _PRINTED for rounding in _ROUNDINGS]
_AMONG: dict[Exchange, str] = {"peers": "among peers", "server": "through a server"}


def _cells(scale: Scale) -> Sequence[AveragesCell]:
    return [*cells([FLOATS, _RMS, *_ADAPTIVE], scale), *cells(_ADAPTIVE, scale, exchange="peers")]


def _line(found: Found, label: str, design: str, exchange: Exchange, printed: tuple[float | None, ...]) -> list[str]:
    """A row: raw bits, coded bits and ratio, the paper's and ours each, and what it costs."""
    raw, coded = (statistics.fmean(of(found, design, each, exchange)) for each in (raw_bits, coded_bits))
    floats, mine = (of(found, *each) for each in ((FLOATS, percent), (design, percent, exchange)))
    ours = (f"{raw:.2f}", f"{coded:.2f}", f"{32 / coded:.2f}×")
    unit = ("", "", "×")
    theirs = ("–" if each is None else f"{each}{u}" for each, u in zip(printed, unit, strict=True))
    differences = [b - a for a, b in zip(floats, mine, strict=True)]
    by_seed = ", ".join(f"{each:+.2f}" for each in differences)
    pairs = [text for pair in zip(theirs, ours, strict=True) for text in pair]
    return [label, _AMONG[exchange], *pairs, f"{statistics.fmean(differences):+.2f}", by_seed]


def _show(found: Found) -> Shown:
    panels, lines = [], []
    for c, printed in _PRINTED.items():
        finding = next(f for cell, f in found.items() if cell.design == adaptive(c) and cell.exchange == "server")
        x = epochs(finding.coded)
        series = [Series(label="raw", x=x, y=finding.raw), Series(label="Huffman", x=x, y=finding.coded)]
        panels.append(Panel(title=f"c = {c}, M = 4", x_label="epoch", y_label="bits a weight", series=series))
        for exchange in _AMONG:
            for rounding in _ROUNDINGS:
                design = adaptive(c, rounding=rounding)
                lines.append(_line(found, f"c = {c}, N = {rounding}(H + c)", design, exchange, printed))
    lines.append(_line(found, "N = log(G + 1) + 8 (§3.2)", _RMS, "server", (None, None, None)))
    header = ["", "exchange", "raw bits, paper", "ours", "coded, paper", "ours", "ratio, paper", "ours"]
    header += ["points against float", "by seed"]
    return Shown(
        setting=setting(found),
        tables=[Table(header, lines, "Bits a weight, mean over all epochs", left=2)],
        charts=[Chart(name="entropy-figure-5", caption="Bits a weight by epoch: raw, and as sent.", panels=panels)],
        notes=[
            "The paper does not say how N = H + c is rounded, nor who averages (section 2). Through a server, an "
            "average is coded a second time; among peers every worker averages the weights that it decodes. Coded "
            "bits are of the weights that a worker sends; raw bits are of the average after an epoch's exchange."
        ],
    )


def _figure_1_cells(scale: Scale) -> list[AveragesCell]:
    return cells([FLOATS, *map(fixed, _BITS[scale])], scale)


def _probed_cells(scale: Scale) -> list[AveragesCell]:
    return cells([adaptive(6)], scale, probes=True)


_entry = scaled("entropy", SCALED)
ENTRIES = (
    _entry("figure-1", "accuracy by quantisation bits, 2 to 30", 3, _figure_1_cells, _show_figure_1),
    _entry("figure-2", "RMS of the derivative by epoch and layer", 1, _probed_cells, _show_figure_2),
    _entry("figure-3", "entropy of the weights by sample ratio and bins", 1, _probed_cells, _show_figure_3),
    _entry("figure-4", "accuracy and convergence by ceiling and floor", 4, _figure_4_cells, _show_figure_4),
    _entry("figure-5", "bits by epoch, raw and Huffman; the 9.0 and 8.5 times", 3, _cells, _show),
)
