"""Øland & Raj (2015), figure 5: bits a weight by epoch, and the two ratios of section 5 with what they cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.studies.reproduce.averages import FLOATS, AveragesCell, Exchange
from thinwire_lab.studies.reproduce.entropy_cells import (
    SCALED,
    Found,
    adaptive,
    cells,
    coded_bits,
    epochs,
    of,
    percent,
    raw_bits,
    setting,
)
from thinwire_lab.studies.reproduce.entry import Scale, Shown, Study, scaled

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
        charts=[
            Chart(
                name="entropy-figure-5",
                caption="Bits a weight by epoch: raw, of the average, and coded, as sent.",
                panels=panels,
            )
        ],
        notes=[
            "N = H + c is a real number and the paper does not say how it is rounded; 6.8 raw bits at c = 5 are a mean "
            "entropy of 1.8 without rounding up. The last row follows the derivative itself, which is small beside 1: "
            "its bits are nearly the floor.",
            "The paper leaves open who averages (section 2). Through a server, an average is coded a second time, and "
            "what an epoch changes by less than half a bin is lost. Among peers every worker sends its weights to all "
            "others and averages what it decodes: five roundings that differ, and no second one. Coded bits are those "
            "of what a worker sends, beside 32 either way; raw bits are those of a bin's number in the average that "
            "worker 0 has after an epoch's exchange.",
        ],
    )


ENTRY = scaled("entropy", SCALED)(
    "figure-5", "bits by epoch, raw and Huffman; the 9.0 and 8.5 times", 3, Study(cells=_cells, show=_show)
)
