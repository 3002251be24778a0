"""Machines that are worker and server: the thesis's speed-ups, and their tables."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.tests.studies.reproduce.findings import shown, timed
from thinwire.errors import EngineError
from thinwire_lab.jobs import grid
from thinwire_lab.jobs.results import Results
from thinwire_lab.studies.reproduce import mps_processes, mps_speedups
from thinwire_lab.studies.reproduce.entry import Cell, Finding
from thinwire_lab.studies.reproduce.mps_nodes import (
    STALE,
    STALE_TOP,
    TENSORFLOW,
    NodesCell,
    NodesFinding,
    generated_bps,
    nodes,
    steady,
    thin_link,
)
from thinwire_lab.studies.reproduce.run import Runs


def told(cell: Cell) -> Finding:
    """A finding as if all machines but the first were of use: half as much with variables in turn."""
    assert isinstance(cell, NodesCell)
    seconds = 0.2 if cell.design == TENSORFLOW and cell.workers > 1 else 0.1
    return timed(2 * seconds if cell.measured else seconds, 0.1)


class Ran(SimpleNamespace):
    """A run of so many steps and seconds, which sent 10 bytes a step and 100 once."""

    def __init__(self, steps: int, seconds: float) -> None:
        nbytes = {"wire_bytes_push": 10 * steps, "wire_bytes_pull": 100}
        super().__init__(steps=steps, seconds_per_step=seconds / (steps - 1), **nbytes)


def test_step_is_the_difference_of_two_runs() -> None:
    assert steady(Ran(7, 0.7), Ran(13, 1.3)) == pytest.approx((0.1, 10))  # type: ignore[arg-type]


SPOILT = {"four machines are more than four": 0.06024, "a step takes less than no time": -0.01}


@pytest.mark.parametrize("seconds", SPOILT.values(), ids=SPOILT)
def test_impossible_finding_is_repeated_then_raises_engine_error(
    seconds: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a single machine's step of 0.1 s, 0.06024 s are a speed-up of 6.64."""
    [cell] = nodes([STALE_TOP], "quick", 0.5)
    spoilt, good = (timed(each, 0.1) for each in (seconds, 0.125))
    ran = [spoilt, spoilt, good]
    monkeypatch.setattr(NodesCell, "run", lambda *_: ran.pop(0))
    results = Results[Finding](tmp_path / "results.json", [NodesFinding])
    results.add(cell.key(), spoilt)  # of a command that took it
    grid.run(Runs([cell]), results, {})
    assert results.find(cell.key()) == good and ran == []
    monkeypatch.setattr(NodesCell, "run", lambda *_: spoilt)
    results = Results[Finding](None, [NodesFinding])
    with pytest.raises(EngineError, match="This machine is loaded"):
        grid.run(Runs([cell]), results, {})
    assert results.runs == [], "and nothing of it is kept"


def test_link_rate_follows_the_generated_share() -> None:
    [cell] = nodes([STALE_TOP], "tiny", 0.5)
    parameters = 17_226
    assert generated_bps(cell.job(), 0.01) == 32 * parameters * 100
    assert thin_link(cell, 0.5, 0.01) == f"{2 * 32 * parameters * 100 / 1e6:.1f}mbit"
    finding = cell.run(lambda *_: None)
    [uncompressed] = nodes(["fp32"], "tiny", 0.5)
    sent_bytes = uncompressed.run(lambda *_: None).sent_bytes
    assert sent_bytes > 4 * finding.sent_bytes
    # An exchange every six steps, without that of the run's end and the first weights.
    [stale] = nodes([STALE], "tiny", 0.5)
    assert stale.run(lambda *_: None).sent_bytes == pytest.approx(sent_bytes / 6, rel=0.02)


def test_scaling_keeps_measured_and_modelled_apart() -> None:
    [table] = shown(mps_processes.ENTRIES, "figure-5.5", "quick", told).tables
    header, lines = table.header, table.lines
    assert [line[0] for line in lines] == ["1", "2", "4", "8", "16"]
    assert [title.partition(":")[0] for title in header[3:]] == ["ours, modelled"] * 2 + ["ours, measured"] * 2
    assert lines[1][1:] == ["1.43", "1.99", "1.00", "2.00", "0.50", "1.00"]
    assert lines[4][1:] == ["–", "–", "8.00", "16.00", "–", "–"]


def test_bits_a_second_are_the_thesis_where_the_network_is_known() -> None:
    single = mps_speedups.SingleFinding(seconds=0.01, bps=1e8)
    table, _ = shown(mps_speedups.ENTRIES, "table-1.1", "quick", lambda cell: single).tables
    assert [line[-2:] for line in table.lines] == [
        ["746.5M", "746.5M"],
        ["207.2M", "207.4M"],
        ["2.01G", "2,007.7M"],
    ]
    [figure] = shown(mps_speedups.ENTRIES, "figure-1.1", "quick", told).tables
    lines = figure.lines
    assert ["ResNet", "synchronous", "4", "115 %", "50 %"] in lines and len(lines) == 12
