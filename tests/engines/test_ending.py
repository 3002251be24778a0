"""Whatever a command has started ends with it, in whichever session it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lab.tests.engines.test_local import alive, wait_until_gone
from thinwire.engines import ending

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
# As torchrun starts ranks: a child in a session of its own, which it does not end itself.
STARTER = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def start(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        stderr=subprocess.PIPE,
    )


def test_a_child_in_another_session_that_ignores_the_request_ends_too() -> None:
    with start(STARTER) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert os.getsid(child) == child and alive(child)
        ending.end_all(process)
        assert process.returncode == -signal.SIGTERM
        assert wait_until_gone([child]) == []


def test_a_command_that_does_not_end_when_asked_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with start(STUBBORN) as process:
        assert process.stdout is not None
        process.stdout.readline()
        monkeypatch.setattr(ending, "ENDING_S", 0.2)
        ending.end_all(process)
        assert process.returncode == -signal.SIGKILL


def test_a_command_that_has_ended_is_no_error() -> None:
    with start("") as process:
        process.wait()
        ending.end_all(process)
        assert process.returncode == 0
