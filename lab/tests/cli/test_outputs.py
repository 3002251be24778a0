"""Output files of commands: impossible ones are reported first, and inputs are never overwritten."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import Result

Command = Callable[..., Result]

NOWHERE = "/proc/nope/x"


def test_unwritable_outputs_are_reported_first(command: Command) -> None:
    for arguments in (
        ["train", "--steps", "3", "--json", f"{NOWHERE}.json"],
        ["compare", "--designs", "fp32", "--out", NOWHERE],
        ["reproduce", "3lc-table-2", "--out", NOWHERE],
        ["demo", "--png", "picture.jpgx"],
    ):
        result = command(*arguments)
        assert (result.status, result.out) == (2, "") and "error: " in result.err, arguments


def test_existing_results_are_not_replaced(tmp_path: Path, command: Command) -> None:
    there = tmp_path / "notes.txt"
    there.write_text("mine")
    result = command("bench", "memory", "--json", there)
    assert result.status == 2 and "exists: add to it with --resume" in result.err
    result = command("bench", "memory", "--json", "-")
    assert result.status == 2 and "needs a file" in result.err and result.out == ""
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
def test_two_outputs_in_one_file_raise_config_error(
    arguments: list[str], what: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(*arguments)
    assert result.status == 2 and re.fullmatch(f"error: .*is where .*{what}; write to another file\n", result.err)
    assert list(tmp_path.iterdir()) == []
