"""`thinwire compare`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.tests.jobs.outcomes import run_outcome
from tests.cli.commands import Full, Result
from thinwire.errors import EngineError
from thinwire_lab.cli import compare, running
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome

Command = Callable[..., Result]
ASKED = ("compare", "--designs", "fp32,3lc[s=1.75,entropy=zstd]", "--links", "none", "--steps", 5)


def told(job: Job, shaping: str, *, in_process: bool = False) -> RunOutcome:
    seconds_per_step = 0.25 if job.design == "fp32" else 0.05
    return run_outcome(design=job.design, steps=job.steps, seconds_per_step=seconds_per_step)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that are run, all of which are only told."""
    jobs: list[Job] = []

    def noted(job: Job, shaping: str, *, in_process: bool = False) -> RunOutcome:
        jobs.append(job)
        return told(job, shaping)

    monkeypatch.setattr(running, "run_with_progress", noted)
    return jobs


def test_what_is_printed_and_written(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(running, "run_with_progress", told)
    result = command(*ASKED, "--out", tmp_path / "out", "--json", tmp_path / "copy.json")
    assert (result.status, result.err) == (0, "")
    assert "1/2  fp32, mlp, no limit, seed 0, 5 steps" in result.out
    assert "2/2  3lc[s=1.75,entropy=zstd], mlp, no limit, seed 0, 5 steps" in result.out
    assert "75.00" in result.out and "0.500 / 0.250" in result.out and "0.0500 s, 5.0×" in result.out
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written == json.loads((tmp_path / "copy.json").read_text())
    assert [row["design"] for row in written["rows"]] == ["fp32", "3lc[s=1.75,entropy=zstd]"]
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    again = command(*ASKED, "--out", tmp_path / "out")
    assert again.status == 0 and "seed 0, 5 steps" not in again.out and "5.0×" in again.out


def test_what_is_of_different_machines_is_told(command: Command, made: list[Job], tmp_path: Path) -> None:
    assert command(*ASKED, "--out", tmp_path).status == 0
    path = tmp_path / "results.json"
    kept = json.loads(path.read_text())
    kept["runs"][0]["machine"]["processor"] = "a [slower] one"
    path.write_text(json.dumps(kept))
    result = command(*ASKED, "--out", tmp_path)
    assert (result.status, len(made)) == (0, 2)
    for text in (result.out, (tmp_path / "report.html").read_text()):
        assert "timed on different machines: " in text and "a [slower] one" in text


@pytest.mark.parametrize("name", ["results.json", "report.html"])
def test_json_is_not_written_over_what_the_folder_keeps(
    name: str, command: Command, made: list[Job], tmp_path: Path
) -> None:
    result = command(*ASKED, "--out", tmp_path, "--json", tmp_path / "x" / ".." / name)
    assert result.status == 2 and "is where the runs are kept" in result.err and made == []


def test_what_is_chosen_for_all_reaches_every_run(command: Command, made: list[Job], tmp_path: Path) -> None:
    result = command(*ASKED, "--compression", "by-shape", "--servers-on-workers", "--out", tmp_path)
    assert (result.status, result.err) == (0, "")
    assert [(job.compression, job.servers_on_workers) for job in made] == [("by-shape", True)] * 2
    assert "servers: one on every worker's node, compression=by-shape\n" in result.out
    asked = json.loads((tmp_path / "results.json").read_text())["comparison"]
    assert asked["compression"] == "by-shape" and asked["servers_on_workers"] is True


def test_numbers_in_place_of_the_recipes_reach_every_run(command: Command, made: list[Job], tmp_path: Path) -> None:
    given = {
        "optimizer": "SGD",
        "momentum": 0.0,
        "weight_decay": 0.25,
        "dropout": 0.5,
        "segments": "fixed",
        "schedule": "step",
        "final": 0.5,
    }
    arguments = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    result = command(*ASKED, *arguments, "--out", tmp_path)
    assert (result.status, result.err) == (0, "")
    assert len(made) == 2
    for job in made:
        assert {name: getattr(job.recipe(), name) for name in given} == given
    chosen = "final=0.5, schedule=step, optimizer=SGD, momentum=0.0, weight_decay=0.25, dropout=0.5, segments=fixed"
    assert chosen in " ".join(result.out.split())
    page = (tmp_path / "report.html").read_text()
    assert f"Chosen for every design: {chosen}." in page
    assert command(*ASKED, "--out", tmp_path).status == 0 and len(made) == 4, "those of the recipe are other runs"


def test_in_process_is_for_the_runs_that_nobody_times(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str | None, bool]] = []

    def noted(job: Job, shaping: str, *, in_process: bool = False) -> RunOutcome:
        asked.append((job.link, in_process))
        return told(job, shaping)

    monkeypatch.setattr(running, "run_with_progress", noted)
    monkeypatch.setattr(compare, "with_privileges", lambda link, shaping: None)
    arguments = ["--designs", "fp32", "--links", "1mbit", "--steps", 5, "--in-process", "--out", tmp_path]
    assert command("compare", *arguments).status == 0
    assert asked == [(None, True), ("1mbit", False)]


def test_a_standard_output_that_takes_nothing_ends_no_comparison(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(running, "run_with_progress", lambda job, shaping, *, in_process=False: told(job, shaping))
    monkeypatch.setattr(sys, "stdout", Full())
    result = command("compare", "--designs", "fp32", "--steps", 5, "--out", tmp_path, "--json", tmp_path / "out.json")
    sys.stdout.close()
    assert result.status == 0
    assert "standard output takes no more lines (No space left on device); all else goes on" in result.err
    assert json.loads((tmp_path / "out.json").read_text()) and (tmp_path / "report.html").exists()


def test_what_nobody_timed_is_in_no_table_of_times(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(running, "run_with_progress", lambda job, shaping, *, in_process: _in_process(job))
    result = command(*ASKED, "--in-process", "--workers", 1, "--out", tmp_path)
    assert (result.status, result.err) == (0, "")
    assert "mlp on digits, 1 worker, seeds: 1" in result.out and "75.00" in result.out
    assert "seconds per step" not in result.out and "–×" not in result.out
    page = (tmp_path / "report.html").read_text()
    assert "1 worker;" in page and "<th>seconds per step</th>" not in page


def test_a_node_has_one_link_only_in_the_kernel(command: Command, tmp_path: Path) -> None:
    arguments = ["--servers-on-workers", "--shaping", "application", "--links", "1mbit", "--out", tmp_path / "out"]
    result = command("compare", *arguments)
    assert result.status == 2 and "share its link only with kernel shaping" in result.err
    assert not (tmp_path / "out").exists(), "said before the first run, not after it"


def test_ctrl_c_keeps_what_is_done(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(job: Job, shaping: str, *, in_process: bool = False) -> RunOutcome:
        if job.design != "fp32":
            raise KeyboardInterrupt
        return told(job, shaping)

    monkeypatch.setattr(running, "run_with_progress", interrupted)
    result = command(*ASKED, "--out", tmp_path)
    assert result.status == 130 and "interrupted" in result.err
    assert "the same command goes on from there" in result.out
    assert len(json.loads((tmp_path / "results.json").read_text())["runs"]) == 1
    result = command("compare", "--designs", "int8", "--steps", 5, "--out", tmp_path / "new")
    assert result.status == 130 and "goes on from there" not in result.out, "nothing is kept before the first run"


def test_a_failed_run_is_the_commands_failure(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(job: Job, shaping: str, *, in_process: bool = False) -> RunOutcome:
        if job.design == "fp32":
            raise EngineError("worker 0 ended with exit status 1")
        return told(job, shaping)

    monkeypatch.setattr(running, "run_with_progress", failing)
    result = command(*ASKED, "--out", tmp_path)
    assert result.status == 1
    assert result.err.startswith("error: 1 runs failed") and "worker 0 ended with exit status 1" in result.err
    assert "75.00" in result.out and "worker 0 ended" in (tmp_path / "report.html").read_text()


def _in_process(job: Job) -> RunOutcome:
    return run_outcome(design=job.design, steps=job.steps, in_process=True)
