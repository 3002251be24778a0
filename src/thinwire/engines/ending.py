"""Ends a command that has its own session, and its descendants."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

ENDING_S = 5.0
"""Seconds from SIGTERM to SIGKILL."""


def end_all(process: subprocess.Popen[Any]) -> None:
    """Sends SIGTERM to a command and its group, waits, and kills its remaining descendants.

    torchrun's ranks have sessions, so that no signal to its group reaches them.

    Args:
        process: started with `start_new_session=True`; if it has ended, its group alone is killed.
    """
    # Read now: once the process is gone, its children have another parent.
    started = _descendants(process.pid) if process.poll() is None else set[int]()
    try:
        _signal_group(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
    finally:
        if process.returncode is None:
            started |= _descendants(process.pid)
        for pid in started:
            with suppress(ProcessLookupError, PermissionError):  # gone, or another user's
                os.kill(pid, signal.SIGKILL)
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _descendants(pid: int) -> set[int]:
    """Returns the ids of a process's descendants; none without /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: set[int] = set()
    new = [pid]
    while new:
        new = [child for each in new for child in children.get(each, ()) if child not in found]
        found.update(new)
    return found
