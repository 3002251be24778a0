"""A role in a Ray actor: a child process, or a call in a thread.

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

_DRAIN_S = 2.0  # after an end: seconds that its output may stay open
_LOOK_S = 0.5  # seconds for which `events` may block other calls

RoleEvent = tuple[str, Any]
"""`line` and its text; `result` and what a call returned; `ended` and (status, last lines)."""


class RoleActor:
    """One role of a Ray engine; it runs one command or call. Methods run one after the other."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._heard = queue.SimpleQueue[RoleEvent]()

    def run(self, arguments: Sequence[str], python: bool, environment: dict[str, str]) -> tuple[int, int]:
        """Starts a process.

        Args:
            arguments: the command, without its program if that is this Python.
            python: whether the program is this Python.
            environment: variables besides the actor's.

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
        """Returns the role's new events in order; an empty list after `_LOOK_S` without one."""
        found: list[RoleEvent] = []
        with suppress(queue.Empty):
            found.append(self._heard.get(timeout=_LOOK_S))
            while True:
                found.append(self._heard.get_nowait())
        return found

    def stop(self) -> None:
        """Ends the process and its descendants."""
        if self._process is not None:
            end_all(self._process)


def _listen(process: subprocess.Popen[str], heard: queue.SimpleQueue[RoleEvent]) -> None:
    """Puts a process's lines, and its end, into the queue."""
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
