"""Accuracy by iteration and by time, from made-up curves."""

from __future__ import annotations

from lab.tests.studies.reproduce.findings import shown, timed, trained
from thinwire_lab.studies.reproduce.entry import Cell, Finding
from thinwire_lab.studies.reproduce.mps_convergence import ENTRIES, ConvergenceCell
from thinwire_lab.studies.reproduce.mps_nodes import STALE_TOP, NodesCell


def told(cell: Cell) -> Finding:
    """All but `stale 5, top 1 %` learn a tenth at each of nine evaluations; that one lags by one, at a third of the
    time."""
    assert isinstance(cell, NodesCell | ConvergenceCell)
    ours = cell.design == STALE_TOP
    if isinstance(cell, NodesCell):
        return timed(0.1 if ours else 0.3, single_s=0.25)
    return trained(*((10 * i, (i - ours) / 10) for i in range(1, 10)))


def test_mps_time_to_equal_accuracy_is_a_share_of_the_baselines() -> None:
    [table] = shown(ENTRIES, "figure-5.8", "quick", told).tables
    last, third = table.lines[-1], table.lines[2]
    assert third == ["60.0%", "18.00 s", "7.00 s", "15.00 s", "43%", "39%"]
    assert last[0] == "90.0%" and last[2] == last[-1] == "not reached"
    by_iteration = shown(ENTRIES, "figure-5.7", "full", told)
    assert [line[-1] for line in by_iteration.tables[0].lines] == ["90.00", "90.00", "90.00", "80.00"]
    assert "3 seeds" in by_iteration.setting
