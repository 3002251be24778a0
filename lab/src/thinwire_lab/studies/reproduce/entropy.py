"""Øland & Raj (2015): figures 1 to 5, the last with the two ratios of section 5."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter
from statistics import fmean, median

import numpy as np

from thinwire.codecs.entropy import MIN_SAMPLE
from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.studies.compare_rows import spread
from thinwire_lab.studies.reproduce import averages as on
from thinwire_lab.studies.reproduce.averages import AveragesCell, AveragesFinding, adaptive, cells
from thinwire_lab.studies.reproduce.entry import Found, Scale, Shown, chart, percent, scaled

_BITS: dict[Scale, Sequence[int]] = {"tiny": (2, 8), "quick": (2, 4, 6, 8, 10, 16, 30), "full": range(2, 31)}
_CEILING = 10
_FLOORS: dict[Scale, Sequence[int]] = {"tiny": (6, 10), "quick": (2, 4, 5, 6, 7, 8, 10), "full": range(2, 11)}
_OF_FOUR: dict[Scale, Sequence[int]] = {"tiny": (5, 6), "quick": range(3, 9), "full": range(1, 11)}


def _show_figure_1(found: Found) -> Shown:
    designs = [design for design in found.each("design") if design != on.FLOATS]
    bits = [int(design.split("=")[-1].rstrip("]")) for design in designs]
    floats, medians, lines = found.where(design=on.FLOATS).mean(percent), [], []
    for design, number in zip(designs, bits, strict=True):
        values = found.where(design=design).figures(percent)
        mean, remark = fmean(values), "baseline recovered (§5.1)" if number == 8 else ""
        medians.append(median(values))
        texts = f"{mean:.2f}{spread(values, 2)}", f"{medians[-1]:.2f}", f"{mean - floats:+.2f}"
        lines.append([str(number), *texts, remark])
    series = [
        on.mean_line(found, bits, designs, percent),
        Series(label="median", x=bits, y=medians),
        Series(label="float", x=[min(bits), max(bits)], y=[floats, floats]),
    ]
    axes = "bits a weight", "test accuracy (%)"
    return Shown(
        setting=on.setting(found),
        tables=[Table(["bits", "accuracy %", "median %", f"against float, {floats:.2f} %", "paper"], lines)],
        charts=[chart("entropy-figure-1", "Accuracy by bits of every weight.", series, *axes)],
        notes=["The paper prints no accuracies; it recovers the baseline at 8 bits, and loses below."],
    )


def _layers(found: Found) -> dict[str, int]:
    return {f"{wide} × {narrow}": wide * narrow for wide, narrow in pairwise(on.widths(found))}


def _show_figure_2(found: Found) -> Shown:
    rms, layers = found.first[1].rms, _layers(found)
    x = list(range(1, len(rms) + 1))
    series = [Series(label=name, x=x, y=[epoch[layer] for epoch in rms]) for layer, name in enumerate(layers)]
    axes = "epoch", "RMS of the derivative"
    lines = [[name, *(f"{epoch[layer]:.2e}" for epoch in (rms[0], rms[-1]))] for layer, name in enumerate(layers)]
    return Shown(
        setting=on.setting(found),
        tables=[Table(["layer", "first epoch", "last epoch"], lines)],
        charts=[chart("entropy-figure-2", "Derivative of the loss by layer.", series, *axes, y_log=True)],
        notes=[
            "The paper: derivatives are larger at higher layers and fall with the epochs. Ours are of batches, whose "
            "noise does not fall, and contain the ℓ1 penalty's."
        ],
    )


def _show_figure_3(found: Found) -> Shown:
    _, probed = found.first
    entropies = np.array(probed.entropies)  # epoch, layer, bits, share
    x, layers = list(range(1, len(probed.entropies) + 1)), _layers(found)
    panels = [
        Panel(
            title=f"{bits} bits",
            x_label="epoch",
            y_label="entropy (bits)",
            series=[
                Series(
                    label=f"{name}, {_sampled(numel, share):.2g}",
                    x=x,
                    y=entropies[:, layer, index, on.SHARES.index(share)].tolist(),
                )
                for layer, (name, numel) in enumerate(layers.items())
                for share in (1.0, 0.03)
                if share == 1 or _sampled(numel, share) < 1
            ],
        )
        for index, bits in enumerate(on.HISTOGRAM_BITS)
    ]
    lines = []
    for layer, (name, numel) in enumerate(layers.items()):
        four = on.HISTOGRAM_BITS.index(on.HISTOGRAM)
        off = np.abs(entropies[:, layer, four, 1:] - entropies[:, layer, four, :1]).mean(0)
        target = np.log2(np.array(probed.rms)[:, layer] + 1)
        whole = entropies[:, layer, four, 0]
        related = np.corrcoef(target, whole)[0, 1] if len(x) > 2 and target.std() > 0 and whole.std() > 0 else np.nan
        offs = [f"{each:.3f}{_instead(numel, share)}" for each, share in zip(off, on.SHARES[1:], strict=True)]
        lines.append([name, *offs, f"{related:.2f}", "> 0.75, often > 0.95"])
    shares = [f"{share:g}" for share in on.SHARES[1:]]
    return Shown(
        setting=on.setting(found),
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
    """Returns the sampled share of a layer's weights, at least that of the minimum sample."""
    return on.sample_size(numel, share) / numel


def _instead(numel: int, share: float) -> str:
    taken = _sampled(numel, share)
    return f" ({taken:.1%})" if taken > 1.01 * share else ""


_peak = attrgetter("peak")


def _coded_bits(finding: AveragesFinding) -> float:
    return fmean(finding.coded)


def _show_figure_4(found: Found) -> Shown:
    asked, base = found.each("design"), found.where(design=on.FLOATS)
    groups = {
        f"ceiling {_CEILING}": {c: d for c in range(1, 11) if (d := adaptive(c, _CEILING - c)) in asked},
        f"M = {on.HISTOGRAM}": {c: d for c in range(1, 11) if (d := adaptive(c)) in asked},
    }
    panels, lines = [], []
    for what, figure in (("accuracy (%)", percent), ("epoch of the peak", _peak)):
        for title, designs in groups.items():
            x = [float(c) for c in designs]
            dots = [median(found.where(design=design).figures(figure)) for design in designs.values()]
            series = [on.mean_line(found, x, list(designs.values()), figure), Series(label="median", x=x, y=dots)]
            series.append(Series(label="float", x=x, y=[base.mean(figure)] * len(x)))
            panels.append(Panel(title=title, x_label="floor c", y_label=what, series=series))
    floats, peak = base.mean(percent), base.mean(_peak)
    for title, designs in groups.items():
        for c, design in designs.items():
            runs = found.where(design=design)
            accuracy, mean = runs.figures(percent), runs.mean(percent)
            texts = f"{mean:.2f}{spread(accuracy, 2)}", f"{mean - floats:+.2f}", f"{runs.mean(_peak):.1f}"
            lines.append([f"{title}, c = {c}", *texts, f"{runs.mean(_coded_bits):.2f}"])
    lines.append(["float", f"{floats:.2f}", "", f"{peak:.1f}", "32"])
    return Shown(
        setting=on.setting(found),
        tables=[Table(["", "accuracy %", "against float", "epoch of the peak", "bits, coded"], lines)],
        charts=[Chart(name="entropy-figure-4", caption="Accuracy and convergence by floor.", panels=panels)],
        notes=[
            "The paper: c = 6 with M = 4 is better than the baseline and converges in 20 % fewer iterations; c = 5 is "
            "just below. M = 0 is a histogram of one bin: N = c."
        ],
    )


def _figure_4_cells(scale: Scale) -> list[AveragesCell]:
    ceiling = [adaptive(c, _CEILING - c) for c in _FLOORS[scale]]
    return cells(list(dict.fromkeys([on.FLOATS, *ceiling, *map(adaptive, _OF_FOUR[scale])])), scale)


# Of section 5: raw bits, bits after Huffman's code, ratio.
_PRINTED = {5: (6.8, 3.55, 9.01), 6: (None, 3.78, 8.47)}
_RMS = "entropy[mode=rms,c=8]"
_ROUNDINGS = ("ceil", "round")
_ADAPTIVE = [adaptive(c, rounding=rounding) for c in _PRINTED for rounding in _ROUNDINGS]
_AMONG: dict[on.Exchange, str] = {"peers": "among peers", "server": "through a server"}


def _cells(scale: Scale) -> Sequence[AveragesCell]:
    return [*cells([on.FLOATS, _RMS, *_ADAPTIVE], scale), *cells(_ADAPTIVE, scale, exchange="peers")]


def _line(found: Found, label: str, design: str, exchange: on.Exchange, printed: tuple[float | None, ...]) -> list[str]:
    """Returns a row: raw bits, coded bits and ratio, the paper's and ours each, and the loss of accuracy."""
    runs = found.where(design=design, exchange=exchange)
    raw, coded = runs.mean(lambda each: fmean(each.raw)), runs.mean(_coded_bits)
    ours, unit = (f"{raw:.2f}", f"{coded:.2f}", f"{32 / coded:.2f}×"), ("", "", "×")
    theirs = ("–" if each is None else f"{each}{u}" for each, u in zip(printed, unit, strict=True))
    pairs = [text for pair in zip(theirs, ours, strict=True) for text in pair]
    floats = found.where(design=on.FLOATS).figures(percent)
    differences = [mine - base for base, mine in zip(floats, runs.figures(percent), strict=True)]
    by_seed = ", ".join(f"{each:+.2f}" for each in differences)
    return [label, _AMONG[exchange], *pairs, f"{fmean(differences):+.2f}", by_seed]


def _show(found: Found) -> Shown:
    panels, lines = [], []
    for c, printed in _PRINTED.items():
        _, finding = found.where(design=adaptive(c), exchange="server").first
        x = list(range(1, len(finding.coded) + 1))
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
        setting=on.setting(found),
        tables=[Table(header, lines, "Bits a weight, mean over all epochs", left=2)],
        charts=[Chart(name="entropy-figure-5", caption="Bits a weight by epoch: raw, and as sent.", panels=panels)],
        notes=[
            "The paper does not say how N = H + c is rounded, nor who averages (section 2). Through a server, an "
            "average is coded a second time; among peers every worker averages the weights that it decodes. Coded "
            "bits are of the weights that a worker sends; raw bits are of the average after an epoch's exchange."
        ],
    )


def _figure_1_cells(scale: Scale) -> list[AveragesCell]:
    return cells([on.FLOATS, *(f"entropy[mode=fixed,bits={bits}]" for bits in _BITS[scale])], scale)


_probed_cells = partial(cells, [adaptive(6)], probes=True)
ENTRIES = scaled(
    *("entropy", on.SCALED),
    ("figure-1", "accuracy by quantisation bits, 2 to 30", 3, _figure_1_cells, _show_figure_1),
    ("figure-2", "RMS of the derivative by epoch and layer", 1, _probed_cells, _show_figure_2),
    ("figure-3", "entropy of the weights by sample ratio and bins", 1, _probed_cells, _show_figure_3),
    ("figure-4", "accuracy and convergence by ceiling and floor", 4, _figure_4_cells, _show_figure_4),
    ("figure-5", "bits by epoch, raw and Huffman; the 9.0 and 8.5 times", 3, _cells, _show),
)
