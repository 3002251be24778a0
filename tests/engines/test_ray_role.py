"""What runs in a Ray actor, without Ray: one role, what it said, and how it ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from thinwire.engines.ray_role import RoleActor, RoleEvent

PATIENCE_S = 20.0


def until(actor: RoleActor, over: Callable[[RoleEvent], bool]) -> list[RoleEvent]:
    """The events up to and with the first that ends it."""
    events: list[RoleEvent] = []
    deadline = time.monotonic() + PATIENCE_S
    while not (events and over(events[-1])):
        assert time.monotonic() < deadline, events
        events += actor.events()
    return events


def ended(event: RoleEvent) -> bool:
    return event[0] == "ended"


def test_a_command_runs_beside_the_actor_and_its_lines_and_end_are_heard_in_order() -> None:
    actor = RoleActor()
    assert actor.events() == []
    own, pid = actor.run(
        ["-c", "import os; print('a'); print(os.environ['MARK'], flush=True); exit(3)"], True, {"MARK": "b"}
    )
    assert own == os.getpid() != pid
    assert until(actor, ended) == [("line", "a"), ("line", "b"), ("ended", (3, []))]
    actor.run(["sh", "-c", "kill -9 $$"], False, {})
    assert until(actor, ended) == [("ended", (-signal.SIGKILL, []))]
    actor.run(["sleep", "600"], False, {})
    actor.stop()
    assert until(actor, ended) == [("ended", (-signal.SIGTERM, []))]
    actor.stop()


def test_a_function_runs_in_the_actor_and_what_it_returns_or_raises_is_heard() -> None:
    actor = RoleActor()
    actor.call(lambda: 6 * 7)
    assert until(actor, ended) == [("result", 42), ("ended", (0, []))]

    def fails() -> Any:
        raise ValueError("no data here")

    actor = RoleActor()
    actor.call(fails)
    [(kind, (status, lines))] = until(actor, ended)
    assert (kind, status, lines[-1]) == ("ended", 1, "ValueError: no data here")
