"""`thinwire demo` and `thinwire inspect` with the lab, and restarts of a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.tests.jobs.outcomes import run_outcome
from tests.cli.commands import Result
from thinwire.engines.roles import own_command
from thinwire.extras import missing
from thinwire_lab.cli import demo, running
from thinwire_lab.engines import system_tools
from thinwire_lab.workloads.models import models


def test_demo_without_matplotlib_has_no_picture_by_default(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lacking(what: str, module: str) -> None:
        raise missing(what, module)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "require", lacking)
    monkeypatch.setattr(running, "run_with_progress", lambda job, shaping: run_outcome(design=job.design))
    asked = ("demo", "--link", "none", "--workers", 1)
    result = command(*asked, "--json", "demo.json")
    assert (result.status, result.err) == (0, "")
    assert "no picture: the picture of --png needs matplotlib" in result.out and "1 worker and 1 server" in result.out
    assert json.loads(Path("demo.json").read_text())["speedup"] == 1
    assert result.out.index("wrote demo.json") < result.out.index("speed-up"), "a table may be more than a disk takes"
    assert not Path("thinwire-demo.png").exists()
    result = command(*asked, "--png", "demo.png")
    assert result.status == 2 and "error: the picture of --png needs matplotlib" in result.err


Command = Callable[..., Result]


def test_models_and_data_are_listed(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    result = command("inspect", "models", "--json", file)
    facts = json.loads(file.read_text())
    assert facts == list(models()) and {"mlp", "lenet", "lenet5", "resnet20"} <= set(facts)
    assert result.status == 0 and all(name in result.out for name in facts)
    result = command("inspect", "data", "--json", file)
    rows = json.loads(file.read_text())
    found = {row["name"]: row for row in rows}
    assert result.status == 0 and found["digits"]["present"] and {"fashion-mnist", "cifar10"} <= found.keys()
    for row in rows:
        assert row["name"] in result.out
        assert row["present"] == (row["where"] is not None) or row["name"] == "digits"
        assert row["present"] or row["how"], "how to get it"


def test_command_restarts_for_kernel_links(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(system_tools, "reexec_in_user_namespace", started.append)
    monkeypatch.setattr("sys.argv", ["thinwire", "train", "--link", "10mbit"])
    monkeypatch.setattr(system_tools, "can_unshare", lambda: True)
    for link, shaping in ((None, "auto"), ("none", "kernel"), ("10mbit", "application")):
        system_tools.with_privileges(link, shaping)
    assert not started, "nothing that the kernel would make"
    system_tools.with_privileges("10mbit", "auto")
    assert started == [own_command("train", "--link", "10mbit")]
    monkeypatch.setattr(system_tools, "can_unshare", lambda: False)
    system_tools.with_privileges("10mbit", "auto")
    assert len(started) == 1, "it would not help"
