"""DoubleSqueeze (Tang et al. 2019): its figures."""

from __future__ import annotations

from thinwire.studies.reproduce.entry import Entry

ENTRIES = (
    Entry(paper="doublesqueeze", item="figure-1", shows="training loss by epoch, 1 bit"),
    Entry(paper="doublesqueeze", item="figure-2", shows="test accuracy by epoch, 1 bit"),
    Entry(paper="doublesqueeze", item="figure-3", shows="seconds per iteration by bandwidth, 1 bit"),
    Entry(paper="doublesqueeze", item="figure-4", shows="training loss by epoch, top-k"),
    Entry(paper="doublesqueeze", item="figure-5", shows="test accuracy by epoch, top-k"),
    Entry(paper="doublesqueeze", item="figure-6", shows="seconds per iteration by bandwidth, top-k"),
)
