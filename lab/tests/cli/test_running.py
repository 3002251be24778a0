"""One run with its progress, where there is no terminal."""

from __future__ import annotations

import pytest

from lab.tests.jobs.outcomes import run_outcome
from thinwire_lab.cli import running
from thinwire_lab.jobs.job import Job


def test_without_a_terminal_there_are_lines_and_no_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "run_in_process", lambda job, on_event: run_outcome(steps=1))
    running.run_with_progress(Job(design="int8"), "auto", in_process=True)
    assert capsys.readouterr().out == "int8  1 step, 75.00%\n"
