"""What runs in a Ray actor, without Ray: one role, what it said, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
    assert actor.events() == [("idle", None)], "as one that Ray started again"
    life, own, pid = actor.run(
        ["-c", "import os; print('a'); print(os.environ['MARK'], flush=True); exit(3)"], True, {"MARK": "b"}
    )
    assert life and own == os.getpid() != pid
    assert until(actor, ended) == [("line", "a"), ("line", "b"), ("ended", (3, []))]
    assert actor.run(["sh", "-c", "kill -9 $$"], False, {})[0] == life, "one life, as long as nobody dies"
    assert until(actor, ended) == [("ended", (-signal.SIGKILL, []))]
    actor.leave("of another life")  # and nothing happens
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


def test_leaving_ends_the_actors_process_so_that_ray_starts_it_again() -> None:
    code = "from thinwire.engines.ray_role import RoleActor as A; a = A(); a.leave(a._life); print('still here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
