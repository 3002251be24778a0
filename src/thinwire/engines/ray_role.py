"""What runs in a Ray actor: one role, a process beside the actor's own or a call in a thread of it.

This file imports no Ray. The process dies with the actor: `parent_watch` ties it to the main thread, which is where Ray
runs an actor's methods.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from thinwire.engines.ending import end_all
from thinwire.engines.engine import TAIL_LINES
from thinwire.engines.parent_watch import with_parent_watch

_DRAIN_S = 2.0  # after an end: how long its output may stay open
_LOOK_S = 0.5  # how long `events` may keep other calls waiting

RoleEvent = tuple[str, Any]
"""`line` and its text; `result` and what a call returned; `ended` and (status, last lines)."""


class RoleActor:
    """One role of a Ray engine, told once what to run. Methods run one after the other."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._heard = queue.SimpleQueue[RoleEvent]()

    def run(self, arguments: Sequence[str], python: bool, environment: dict[str, str]) -> tuple[int, int]:
        """Starts a process.

        Args:
            arguments: the command; without the program where that is the Python that runs this.
            python: whether it is.
            environment: variables on top of what the actor has.

        Returns:
            The process ids of the actor and of the process.
        """
        variables = [f"{name}={value}" for name, value in environment.items()]
        process = self._process = subprocess.Popen(
            with_parent_watch(["env", *variables, *([sys.executable] if python else []), *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=_listen, args=(process, self._heard), name="lines", daemon=True).start()
        return os.getpid(), process.pid

    def call(self, function: Callable[[], object]) -> tuple[int, int]:
        """Calls a function in a thread. Returns as `run`."""

        def work() -> None:
            try:
                self._heard.put(("result", function()))
            except BaseException:
                self._heard.put(("ended", (1, traceback.format_exc().splitlines()[-TAIL_LINES:])))
            else:
                self._heard.put(("ended", (0, [])))

        threading.Thread(target=work, name="worker", daemon=True).start()
        return os.getpid(), os.getpid()

    def events(self) -> list[RoleEvent]:
        """Returns what the role has said since, in order; nothing after a while in which it has said nothing."""
        found: list[RoleEvent] = []
        with suppress(queue.Empty):
            found.append(self._heard.get(timeout=_LOOK_S))
            while True:
                found.append(self._heard.get_nowait())
        return found

    def stop(self) -> None:
        """Ends the process with all that it has started."""
        if self._process is not None:
            end_all(self._process)


def _listen(process: subprocess.Popen[str], heard: queue.SimpleQueue[RoleEvent]) -> None:
    """Passes on a process's lines, and how it ended."""
    reader = threading.Thread(target=_read, args=(process, heard), daemon=True)
    reader.start()
    status = process.wait()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # its own children would hold the pipe open
    reader.join(_DRAIN_S)
    heard.put(("ended", (status, [])))


def _read(process: subprocess.Popen[str], heard: queue.SimpleQueue[RoleEvent]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if line.strip():
                heard.put(("line", line.rstrip()))
