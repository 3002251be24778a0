"""The lab's commands: help with examples, and errors in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.cli.commands import Result, check_help, refusing
from thinwire.cli import main
from thinwire.extras import LAB_COMMANDS

Command = Callable[..., Result]
GROUPS = {
    "bench": {"codecs", "decoupled", "goodput", "hooks", "pays", "memory", "sample"},
    "chaos": {"storms"},
}
COMMANDS = {"demo", "train", "run", "worker", "compare", "race", "reproduce"}


def visible(group: Any) -> dict[str, Any]:
    return {name: command for name, command in group.commands.items() if not command.hidden}


def test_every_command_is_listed_and_its_help_has_an_example(command: Command) -> None:
    root = visible(typer.main.get_command(main.app))
    assert COMMANDS | GROUPS.keys() == LAB_COMMANDS <= root.keys()
    panel = command("--help").out.partition("Lab (thinwire-lab)")[2]
    assert all(re.search(rf"\b{name}\b", panel) for name in LAB_COMMANDS)
    for name in COMMANDS:
        check_help(command, root[name], name)
    for group, names in GROUPS.items():
        assert set(visible(root[group])) == names
        for name in names:
            check_help(command, root[group].commands[name], group, name)
            assert "--json" in command(group, name, "--help").out


def test_help_and_misspelt_options_import_no_torch() -> None:
    refusing(
        *(f"{name} --help" for name in sorted(COMMANDS)),
        *(f"{name} --no-such-option" for name in sorted(COMMANDS)),
        *(f"{group} {name} --help" for group in GROUPS for name in GROUPS[group]),
        *("bench --help", "chaos --help", "trian", "bench hoks", "bench hooks --no-such-option"),
        *("bench memory --ranks many", "chaos storms --runs 0", "train --steps 0", "compare --workers", "worker"),
    )


MISUSE: list[tuple[list[str], str]] = [
    (["train", "--design", "3lc[sparsty=1.5]"], "'sparsty'"),
    (["train", "--model", "lenet6"], "'lenet6'"),
    (["train", "--telemetry", "/dev/null/steps.jsonl"], "'/dev/null/steps.jsonl'"),
    (["train", "--link", "10mb"], "10mbit"),
    (["train", "--resume"], "--checkpoint-dir DIR"),
    (["train", "--address", "auto"], "--engine ray"),
    (["demo", "--seconds", "inf"], "inf seconds"),
    (["worker", "--server", "grpc://127.0.0.1:1", "--events", "--json", "-"], "give --json a file"),
    (["worker", "--server", "127.0.0.1:7070"], "grpc://host:port"),
    (["race", "--models", "lenet", "--rates", "1e-3"], "--rates"),
    # A default that is given counts as given.
    (["race", "--models", "byte-transformer-1m", "--target-accuracy", "0.8"], "--target-accuracy"),
    (["bench", "hooks", "--hook", "zip"], "'zip'"),
    (["bench", "hooks", "--resume"], "--json FILE"),
    (["compare", "--designs", "3lc[s=1.75"], "'3lc[s=1.75'"),
    (["compare", "--links", ","], "no links"),
    (["compare", "--servers", "2", "--servers-on-workers"], "2 servers"),
]


def test_misuse_is_one_line_and_status_2(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, text in MISUSE:
        result = command(*arguments)
        assert result.err.count("\n") == 1 and result.err.startswith("error: "), arguments
        assert result.status == 2 and text in result.err, result.err
    assert list(tmp_path.iterdir()) == []


def test_missing_data_is_reported_before_processes_start(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        pytest.fail("processes were to be started")

    monkeypatch.setattr("thinwire_lab.jobs.processes.run_cluster", started)
    missing = ["--model", "resnet8", "--data", "cifar10", "--data-root", tmp_path]
    for arguments, status, text in (
        (["train", *missing], 1, "the data set cifar10 is not in .*: thinwire inspect data --download cifar10"),
        (["train", "--data", "digits[train=0]"], 2, r"digits\[train=0\]: .* from 1 to 1347"),
        (["demo", "--data", "digits[test=9000]", "--link", "none"], 2, r".* from 1 to 450"),
    ):
        result = command(*arguments)
        assert result.status == status and re.fullmatch(f"error: {text}\n", result.err), (arguments, result)
