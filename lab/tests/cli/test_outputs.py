"""Files that a command is to write: found out to be impossible at once, and never written over what is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import Result
from thinwire_lab.jobs import grid

Command = Callable[..., Result]

NOWHERE = "/proc/nope/x"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--steps", "3", "--json", f"{NOWHERE}.json"],
        ["compare", "--designs", "fp32", "--out", NOWHERE],
        ["reproduce", "3lc-table-2", "--out", NOWHERE],
        ["demo", "--png", "picture.jpgx"],
        ["bench", "pays", "--markdown", f"{NOWHERE}.md"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_said_before_anything_is_done(arguments: list[str], command: Command) -> None:
    result = command(*arguments)
    assert result.status == 2 and "error: " in result.err, result.err
    assert result.out == ""


def test_results_that_are_there_are_not_replaced(tmp_path: Path, command: Command) -> None:
    there = tmp_path / "notes.txt"
    there.write_text("mine")
    result = command("bench", "updates", "--json", there)
    assert result.status == 2 and "is there already: add to it with --resume" in result.err
    result = command("bench", "updates", "--json", "-")
    assert result.status == 2 and "is a file" in result.err and result.out == ""
    assert there.read_text() == "mine"


ADDRESS = ["--server", "grpc://127.0.0.1:1", "--connect-timeout", "0.1"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["train", "--steps", "1", "--telemetry", "same", "--json", "./same"], "the step records are written"),
        (["worker", *ADDRESS, "--telemetry", "same", "--json", "./same"], "the step records are written"),
        (["worker", *ADDRESS, "--checkpoint", "same", "--json", "./same"], "the checkpoint is written"),
        (["worker", *ADDRESS, "--checkpoint", "same", "--json", "same.previous"], "the checkpoint is written"),
        (["worker", *ADDRESS, "--checkpoint", "same", "--telemetry", "./same"], "the checkpoint is written"),
        (["demo", "--link", "none", "--seconds", "1", "--png", "same.png", "--json", "./same.png"], "is drawn"),
    ],
    ids=lambda given: " ".join(word for word in given if word.startswith("--")) if isinstance(given, list) else "",
)
def test_two_things_are_not_written_to_one_file(
    arguments: list[str], what: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(*arguments)
    assert result.status == 2 and re.fullmatch(f"error: .*is where .*{what}; write to another file\n", result.err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "options"),
    [
        (["race"], ["--json", "--png"]),
        (["bench", "pays", "--models", "mlp", "--hook", "none"], ["--json", "--markdown"]),
    ],
)
def test_measured_runs_and_what_is_made_of_them_are_two_files(
    what: list[str], options: list[str], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "run", lambda *given, **options: None)
    monkeypatch.chdir(tmp_path)
    first, second = options
    result = command(*what, "--links", "none", first, "same.png", second, "./same.png")
    assert result.status == 2 and "write to another file" in result.err
    assert list(tmp_path.iterdir()) == []
