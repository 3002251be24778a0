"""`thinwire bench`: what is measured is shown and written, an interrupted grid goes on, failures are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.tests.jobs.outcomes import run_outcome
from tests.cli.commands import Result
from thinwire_lab.bench.transports import Step, TransportCell, TransportsBench

from thinwire.errors import EngineError
from thinwire_lab.bench.options import QUICK, PaysOptions
from thinwire_lab.bench.pays import PaysBench
from thinwire_lab.cli import bench
from thinwire_lab.jobs import cluster, in_process
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome

Command = Callable[..., Result]


def test_tables_and_data_and_going_on(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[TransportCell] = []

    def measure(bench: TransportsBench, cell: TransportCell, before: object, tell: Callable[[str], None]) -> Step:
        tell("going")
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(cell)
        return Step(seconds_per_step=0.01 * len(made), shaping="none")

    monkeypatch.setattr(TransportsBench, "measure", measure)
    file = tmp_path / "new" / "transports.json"
    arguments = ("bench", "transports", "--link", "none", "--rounds", 1, "--json", file)
    result = command(*arguments)
    assert result.status == 130 and "interrupted" in result.err
    assert "10.0 … 10.0" in result.out and f"wrote {file}" in result.out.replace("\n", "")
    assert len(json.loads(file.read_text())["runs"]) == 4
    made.clear()
    result = command(*arguments, "--resume")
    assert (result.status, result.err) == (0, "") and len(made) == 2
    written = json.loads(file.read_text())
    assert [row["seconds_per_step"] for row in written["rows"]] == [0.01, 0.02, 0.03, 0.04, 0.01, 0.02]
    made.clear()
    assert command(*arguments[:-2]).status == 130 and len(made) == 4, "without --resume all is measured again"


def test_what_failed_is_told_and_the_rest_goes_on(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(job: Job) -> RunOutcome:
        if job.design == "fp32":
            raise EngineError("no luck [today]")
        return run_outcome(train_loss=0.5)

    monkeypatch.setattr(in_process, "run", run)
    result = command("bench", "designs", "--designs", "fp32,int8", "--models", "mlp")
    assert result.status == 1
    assert "mlp, fp32: EngineError: no luck [today]" in result.out and "mlp, int8: ok" in result.out
    assert "FAILED" in result.out and "0.500" in result.out
    assert result.err.startswith("error: 1 of 2 failed, the first of them ")


def test_links_that_cannot_be_shaped_are_said_before_anything_is_measured(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster, "available", lambda: (False, "no namespaces here"))
    for what in ("hooks", "race", "pays"):
        file = tmp_path / f"{what}.json"
        result = command("bench", what, "--json", file)
        assert result.status == 1 and result.out == "", what
        assert result.err == "error: the kernel cannot shape links here: no namespaces here\n", what
        assert not file.exists()


def test_buckets_of_no_size_are_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure", lambda asked, *given, **options: None)
    result = command("bench", "hooks", "--bucket-cap-mb", 0)
    assert result.status == 2 and "--bucket-cap-mb" in result.err


def test_a_file_of_other_results_is_left_alone(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"format": 1, "runs": [{}]}')
    result = command("bench", "transports", "--json", file, "--resume")
    assert result.status == 2 and "does not hold results of this kind" in result.err
    assert file.read_text() == '{"format": 1, "runs": [{}]}'


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
