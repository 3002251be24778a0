"""One child process of the engine, and the threads that read what it writes and notice its end.

The process runs in a session of its own, so that Ctrl-C in a terminal reaches only the launcher, and is killed with its
launcher (`parent_watch`). Its events and, last of all, its end go to a queue; its last other lines are kept.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from thinwire.engines.events import Event
from thinwire.engines.parent_watch import with_parent_watch

TAIL_LINES = 20  # kept for the error message
_DRAIN_S = 2.0  # after an end: how long its streams may stay open in somebody else's hands


@dataclass(frozen=True, slots=True)
class Reported:
    """An event, and the name of the process that reported it."""

    process: str
    event: Event


@dataclass(frozen=True, slots=True)
class Ended:
    """A process is gone, and all that it wrote has been read."""

    process: str
    status: int


Inbox = queue.SimpleQueue[Reported | Ended]


class Child:
    """One process, and the threads that read what it writes and notice its end."""

    def __init__(self, name: str, command: Sequence[str], read: Callable[[str], Event | None], inbox: Inbox) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._read_event, self._inbox = read, inbox
        self.process = subprocess.Popen(
            with_parent_watch(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._watcher = threading.Thread(target=self._watch, name=f"watch {name}", daemon=True)
        self._watcher.start()

    def signal(self, signum: int) -> None:
        """Send a signal to the process and to whatever it has started; nothing if it has ended."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signum)

    def join(self, timeout_s: float | None) -> None:
        """Wait until the process has ended and everything that it wrote has been read."""
        self._watcher.join(timeout_s)

    def _watch(self) -> None:
        readers = [
            threading.Thread(target=self._read, args=(stream, reports), daemon=True)
            for stream, reports in ((self.process.stdout, True), (self.process.stderr, False))
        ]
        for reader in readers:
            reader.start()
        status = self.process.wait()
        # Its own children (data loaders, say) would hold the streams open and outlive the run.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for reader in readers:
            reader.join(_DRAIN_S)
        self._inbox.put(Ended(self.name, status))

    def _read(self, stream: IO[str], reports: bool) -> None:
        with stream:
            for line in stream:
                event = self._read_event(line) if reports else None
                if event is not None:
                    self._inbox.put(Reported(self.name, event))
                elif line.strip():
                    self.tail.append(line.rstrip())
