"""Accuracy by iteration and by time, from made-up curves."""

from __future__ import annotations

from thinwire_lab.studies.reproduce.entry import Cell, Finding, Found
from thinwire_lab.studies.reproduce.mps_convergence import ENTRIES, ConvergenceCell, ConvergenceFinding
from thinwire_lab.studies.reproduce.mps_nodes import STALE_TOP, NodesCell, NodesFinding


def told(cell: Cell) -> Finding:
    """All but `stale 5, top 1 %` learn a tenth at each of nine evaluations; that one lags by one, at a third of the
    time."""
    assert isinstance(cell, NodesCell | ConvergenceCell)
    ours = cell.design == STALE_TOP
    if isinstance(cell, NodesCell):
        return NodesFinding(seconds_per_step=0.1 if ours else 0.3, single_s=0.25, link="100mbit", sent_bytes=1.0)
    return ConvergenceFinding(evaluations=[(10 * i, (i - ours) / 10) for i in range(1, 10)])


def test_mps_time_to_equal_accuracy_is_a_share_of_the_baselines() -> None:
    by_iteration, by_time = (entry.study for entry in ENTRIES)
    assert by_iteration is not None and by_time is not None
    shown = by_time.show(Found({cell: told(cell) for cell in by_time.cells("quick")}))
    last, third = shown.tables[0].lines[-1], shown.tables[0].lines[2]
    assert third == ["60.0%", "18.00 s", "7.00 s", "15.00 s", "43%", "39%"]
    assert last[0] == "90.0%" and last[2] == last[-1] == "not reached"
    shown = by_iteration.show(Found({cell: told(cell) for cell in by_iteration.cells("full")}))
    assert [line[-1] for line in shown.tables[0].lines] == ["90.00", "90.00", "90.00", "80.00"]
    assert "3 seeds" in shown.setting
