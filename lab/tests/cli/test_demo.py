"""`thinwire demo`: what is printed and written; the picture is left out where nothing can draw it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.tests.jobs.outcomes import run_outcome
from tests.cli.commands import Result
from thinwire.extras import missing
from thinwire_lab.cli import demo, running


def test_without_matplotlib_there_is_no_picture_unless_it_was_asked_for(
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
