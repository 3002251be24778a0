"""3LC's items, from made-up trainings."""

from __future__ import annotations

import pytest

from lab.tests.studies.reproduce.findings import shown, trained
from thinwire_lab.studies.reproduce.three_lc import ENTRIES
from thinwire_lab.studies.reproduce.three_lc_lag import LAG


def test_lag_papers_line_matches_the_axis() -> None:
    """By table 1 s = 1.75 ends at 93.51 %, s = 1.0 at 93.32 % and float at 93.37 %."""
    [panel] = shown(LAG, "lag", "quick", lambda cell: trained()).charts[0].panels
    [paper] = [series for series in panel.series if series.role == "paper"]
    assert panel.y_label == "s = 1.75 minus s = 1.0, points" and list(paper.y) == pytest.approx([0.19, 0.19])


def test_figure_4_half_way_is_at_half_of_the_steps() -> None:
    curve = trained(*((step, step / 1000) for step in range(50, 501, 50)))
    [table] = shown(ENTRIES, "figure-4", "quick", lambda cell: curve).tables
    assert table.header[-2:] == ["accuracy % half-way", "at the end"]
    assert {tuple(line[-2:]) for line in table.lines} == {("25.00", "50.00")}
