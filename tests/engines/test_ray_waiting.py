"""How long a Ray engine waits, with a stand-in for Ray: its actors are threads of this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.engines import ray_engine
from thinwire.engines.events import Event
from thinwire.engines.ray_engine import RayEngine
from thinwire.errors import EngineError

MOST_WAITS = 8
"""An actor that has nothing to say answers after half a second."""


class Up(Event, frozen=True, kw_only=True):
    turn: int


class Method:
    """A method of an actor, which answers with a future."""

    def __init__(self, remote: Callable[..., Future[Any]]) -> None:
        self.remote = remote

    def options(self, **options: Any) -> Method:
        return self


class Handle:
    """An actor: its methods run one after the other."""

    def __init__(self, actor: object) -> None:
        self._actor, self.pool = actor, ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Method:
        return Method(partial(self.pool.submit, getattr(self._actor, name)))


class StandIn:
    """What the engine uses of Ray, on one node."""

    exceptions = SimpleNamespace(RayError=RuntimeError, RayActorError=RuntimeError, GetTimeoutError=RuntimeError)

    def __init__(self) -> None:
        self._waits = 0
        self.util = SimpleNamespace(
            placement_group=lambda needs, strategy: SimpleNamespace(wait=lambda timeout: True),
            placement_group_table=lambda group: {"bundles_to_node_id": {0: "node", 1: "node"}},
            remove_placement_group=lambda group: None,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *_, **__: None),
        )

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, str]]:
        return [{"NodeID": "node", "NodeManagerAddress": "10.0.0.1"}]

    def remote(self, **options: Any) -> Callable[[type], Any]:
        return lambda kind: SimpleNamespace(remote=lambda: Handle(kind()))

    def get(self, answer: Future[Any], timeout: float | None = None) -> Any:
        return answer.result(timeout)

    def wait(self, answers: Collection[Future[Any]], num_returns: int, timeout: float | None) -> tuple[list[Any], Any]:
        self._waits += 1
        assert self._waits < MOST_WAITS, "the engine waits on and on"
        done, others = wait(answers, timeout, FIRST_COMPLETED)
        return list(done)[:num_returns], others

    def kill(self, handle: Handle) -> None:
        handle.pool.shutdown()


def test_time_is_over_though_actors_answer_that_they_have_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for role, timeout_s, ends in (("server", 0.7, ""), ("worker 0", 0.6, "worker 0 did not report Up within 0.6 s")):
        monkeypatch.setattr(ray_engine, "ray", StandIn())
        with RayEngine([Up], {"server": {"CPU": 1.0}, "worker 0": {"CPU": 1.0}}) as engine:
            engine.start(role, [sys.executable, "-c", "import time; time.sleep(600)"], host=role)
            assert set(engine.pids) == {role}
            began = time.monotonic()
            if ends:
                with pytest.raises(EngineError, match=ends):
                    engine.wait_for(role, Up, timeout_s)
            else:
                assert engine.receive(timeout_s) is None
                assert timeout_s <= time.monotonic() - began < 2 * timeout_s
                assert engine.receive(0) is None
