"""`thinwire bench`: what is measured is shown and written, an interrupted grid goes on, failures are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import Result
from thinwire.planner.transport_costs import TransportCosts
from thinwire_lab.bench.clock import ClockBench, Clocked
from thinwire_lab.bench.options import QUICK, PaysOptions
from thinwire_lab.bench.pays import PaysBench
from thinwire_lab.cli import bench
from thinwire_lab.jobs import cluster
from thinwire_lab.jobs.job import Job

Command = Callable[..., Result]


CLOCK = ("bench", "clock", "--designs", "fp32,int8,3lc", "--links", "none", "--workers", 2, "--workers", 4)


def stand_in(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Job], float]) -> None:
    """Has `bench clock` measure nothing."""

    def measure(bench: ClockBench, cell: Job, before: object, tell: Callable[[str], None]) -> Clocked:
        tell("going")
        return Clocked(measured_s=seconds(cell), modelled_s=0.5, shaping="none", cores=1, costs=TransportCosts())

    monkeypatch.setattr(ClockBench, "measure", measure)


def test_interrupted_bench_keeps_its_runs_and_resumes(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Job] = []

    def seconds(cell: Job) -> float:
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(cell)
        return 0.01 * len(made)

    stand_in(monkeypatch, seconds)
    file = tmp_path / "new" / "clock.json"
    arguments = (*CLOCK, "--json", file)
    result = command(*arguments)
    assert result.status == 130 and "interrupted" in result.err
    assert "0.0100" in result.out and f"wrote {file}" in result.out.replace("\n", "")
    assert len(json.loads(file.read_text())["runs"]) == 4
    assert command(*arguments).status == 2, "a file that is there is added to with --resume alone"
    made.clear()
    result = command(*arguments, "--resume")
    assert (result.status, result.err) == (0, "") and len(made) == 2
    written = json.loads(file.read_text())
    assert [row["measured_s"] for row in written["rows"]] == [0.01, 0.02, 0.03, 0.04, 0.01, 0.02]


def test_links_that_cannot_be_shaped_are_said_before_anything_is_measured(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster, "available", lambda: (False, "no namespaces here"))
    file = tmp_path / "out.json"
    result = command("bench", "hooks", "--json", file)
    assert result.status == 1 and result.out == "" and not file.exists()
    assert result.err == "error: the kernel cannot shape links here: no namespaces here\n"


def test_quick_leaves_what_was_given_also_where_it_is_the_long_runs_own(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PaysBench] = []
    monkeypatch.setattr(bench, "measure", lambda asked, *given, **options: made.append(asked))
    usual = PaysOptions()
    assert command("bench", "pays", "--quick", "--seconds", str(usual.seconds)).status == 0
    assert command("bench", "pays", "--quick", "--links", ",".join(usual.links)).status == 0
    seconds, links = made
    assert (seconds.seconds, seconds.links) == (usual.seconds, QUICK["links"])
    assert (links.seconds, list(links.links)) == (QUICK["seconds"], list(usual.links))
