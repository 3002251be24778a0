"""What runs in a Ray actor: one role, a process beside the actor's own or a call in a thread of it.

An actor that Ray has started again knows of nothing: it says that it is idle, and is told what to run by whoever holds
it (`ray_engine`). This file imports no Ray. Its process dies with the actor: `parent_watch` ties it to the main thread,
which is where Ray runs an actor's methods.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.engines.engine import TAIL_LINES
from thinwire.engines.events import Said
from thinwire.engines.local import LocalEngine

_NAME = "role"
_LOOK_S = 0.5  # how long `events` may keep other calls waiting

RoleEvent = tuple[str, Any]
"""`line` and its text; `result` and what a call returned; `ended` and (status, last lines); `idle` and None."""


class RoleActor:
    """One role of a Ray engine. Methods run one after the other."""

    def __init__(self) -> None:
        self._life = uuid.uuid4().hex  # another one after a death
        self._engine: LocalEngine | None = None
        self._called: queue.SimpleQueue[RoleEvent] | None = None

    def run(self, arguments: Sequence[str], python: bool, environment: dict[str, str]) -> tuple[str, int, int]:
        """Starts a process.

        Args:
            arguments: the command; without the program where that is the Python that runs this.
            python: whether it is.
            environment: variables on top of what the actor has.

        Returns:
            This life of the actor, the process id of the actor and that of the process.
        """
        self._engine = LocalEngine([], lines=True, environment=environment)
        self._engine.start(_NAME, [*([sys.executable] if python else []), *arguments])
        return self._life, os.getpid(), self._engine.pids[_NAME]

    def call(self, function: Callable[[], object]) -> tuple[str, int, int]:
        """Calls a function in a thread. Returns as `run`."""
        called = self._called = queue.SimpleQueue()

        def work() -> None:
            try:
                called.put(("result", function()))
            except BaseException:
                called.put(("ended", (1, traceback.format_exc().splitlines()[-TAIL_LINES:])))
            else:
                called.put(("ended", (0, [])))

        threading.Thread(target=work, name="worker", daemon=True).start()
        return self._life, os.getpid(), os.getpid()

    def events(self) -> list[RoleEvent]:
        """Returns what the role has said since, in order; nothing after a while in which it has said nothing."""
        if self._called is not None:
            return _all(self._called)
        if self._engine is None:
            return [("idle", None)]
        found: list[RoleEvent] = []
        came = self._engine.receive(_LOOK_S)
        while came is not None:
            if isinstance(came[1], Said):
                found.append(("line", came[1].text))
            else:
                found.append(("ended", (came[1], [])))
            came = self._engine.receive(0)
        return found

    def leave(self, life: str) -> None:
        """Dies, so that Ray starts this actor again; nothing where it has done so since that life."""
        if life == self._life:
            os._exit(1)

    def stop(self) -> None:
        """Ends the process with all that it has started."""
        if self._engine is not None:
            self._engine.stop()


def _all(box: queue.SimpleQueue[RoleEvent]) -> list[RoleEvent]:
    found: list[RoleEvent] = []
    try:
        found.append(box.get(timeout=_LOOK_S))
        while True:
            found.append(box.get_nowait())
    except queue.Empty:
        return found
