"""Files that a command is to write: found out to be impossible at once, and never written over what is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import Result

Command = Callable[..., Result]

NOWHERE = "/proc/nope/x"


def test_said_before_anything_is_done(command: Command) -> None:
    for arguments in (
        ["train", "--steps", "3", "--json", f"{NOWHERE}.json"],
        ["compare", "--designs", "fp32", "--out", NOWHERE],
        ["reproduce", "3lc-table-2", "--out", NOWHERE],
        ["demo", "--png", "picture.jpgx"],
        ["bench", "pays", "--markdown", f"{NOWHERE}.md"],
    ):
        result = command(*arguments)
        assert (result.status, result.out) == (2, "") and "error: " in result.err, arguments


def test_results_that_are_there_are_not_replaced(tmp_path: Path, command: Command) -> None:
    there = tmp_path / "notes.txt"
    there.write_text("mine")
    result = command("bench", "memory", "--json", there)
    assert result.status == 2 and "is there already: add to it with --resume" in result.err
    result = command("bench", "memory", "--json", "-")
    assert result.status == 2 and "is a file" in result.err and result.out == ""
    assert there.read_text() == "mine"


ADDRESS = ["--server", "grpc://127.0.0.1:1", "--connect-timeout", "0.1"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["train", "--steps", "1", "--telemetry", "same", "--json", "./same"], "the step records are written"),
        (["worker", *ADDRESS, "--checkpoint", "same", "--json", "same.previous"], "the checkpoint is written"),
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
