"""`thinwire compare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.tests.jobs.outcomes import run_outcome
from tests.cli.commands import Result
from thinwire.errors import EngineError
from thinwire_lab.cli import running
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


def test_compare_prints_and_writes_results(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(running, "run_with_progress", told)
    result = command(*ASKED, "--out", tmp_path / "out", "--json", tmp_path / "copy.json")
    assert (result.status, result.err) == (0, "")
    assert "1/2  fp32, mlp, no limit, seed 0, 5 steps" in result.out
    assert "2/2  3lc[s=1.75,entropy=zstd], mlp, no limit, seed 0, 5 steps" in result.out
    assert "75.00" in result.out and "0.500 / 0.250" in result.out and "0.0500 s, 5.0×" in result.out
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    copy = json.loads((tmp_path / "copy.json").read_text())
    assert [len(table["lines"]) for table in copy.pop("tables")] == [2, 2] and copy == written
    assert [row["design"] for row in written["rows"]] == ["fp32", "3lc[s=1.75,entropy=zstd]"]
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    again = command(*ASKED, "--out", tmp_path / "out")
    assert again.status == 0 and "seed 0, 5 steps" not in again.out and "5.0×" in again.out


def test_json_over_the_folders_files_raises_config_error(command: Command, made: list[Job], tmp_path: Path) -> None:
    result = command(*ASKED, "--out", tmp_path, "--json", tmp_path / "x" / ".." / "report.html")
    assert result.status == 2 and "is where the runs are kept" in result.err and made == []


def test_compare_recipe_options_reach_every_run(command: Command, made: list[Job], tmp_path: Path) -> None:
    given = {"optimizer": "SGD", "weight_decay": 0.25, "dropout": 0.5}
    arguments = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    result = command(*ASKED, *arguments, "--out", tmp_path)
    assert (result.status, result.err) == (0, "")
    assert len(made) == 2
    for job in made:
        assert {name: getattr(job.recipe(), name) for name in given} == given
    page = (tmp_path / "report.html").read_text()
    assert "Options of every design: servers=1, optimizer=SGD, weight_decay=0.25, dropout=0.5." in page
    assert command(*ASKED, "--out", tmp_path).status == 0 and len(made) == 4, "those of the recipe are other runs"


def test_compare_ctrl_c_keeps_finished_runs(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(job: Job, shaping: str, *, in_process: bool = False) -> RunOutcome:
        if job.design != "fp32":
            raise KeyboardInterrupt
        return told(job, shaping)

    monkeypatch.setattr(running, "run_with_progress", interrupted)
    result = command(*ASKED, "--out", tmp_path)
    assert result.status == 130 and "interrupted" in result.err
    assert "the same command continues from there" in result.out
    assert len(json.loads((tmp_path / "results.json").read_text())["runs"]) == 1
    result = command("compare", "--designs", "int8", "--steps", 5, "--out", tmp_path / "new")
    assert result.status == 130 and "continues from there" not in result.out, "no file before the first run"


def test_compare_failed_run_fails_the_command(
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
