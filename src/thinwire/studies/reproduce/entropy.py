"""Øland & Raj (2015): their figures."""

from __future__ import annotations

from thinwire.studies.reproduce.entry import Entry

ENTRIES = (
    Entry(paper="entropy", item="figure-1", shows="accuracy by quantisation bits, 2 to 30"),
    Entry(paper="entropy", item="figure-2", shows="RMS of the derivative by epoch and layer"),
    Entry(paper="entropy", item="figure-3", shows="entropy of the weights by sample ratio and bins"),
    Entry(paper="entropy", item="figure-4", shows="accuracy and convergence by ceiling and floor"),
    Entry(paper="entropy", item="figure-5", shows="bits by epoch, raw and Huffman; the 9.0 and 8.5 times"),
)
