"""Progress lines of commands."""

from __future__ import annotations

import sys

import pytest

from tests.cli.commands import Full
from thinwire.cli.console import console
from thinwire_lab.cli.progress import Lines


def test_progress_lines_on_a_full_disk_end_no_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines()
    monkeypatch.setattr(sys, "stdout", Full())
    for _ in range(2):
        lines.say("step 1", always=True)
    console.print("nor does what comes after them")
    assert capsys.readouterr().err.count("all else goes on") == 1
    sys.stdout.close()
