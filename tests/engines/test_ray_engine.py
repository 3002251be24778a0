"""Roles as actors of a real Ray on this machine: they report, come back when they are killed, and leave nothing.

`make test-frameworks` runs these; what needs no Ray is in `test_ray_role`,
`test_ray_waiting` and `tests/jobs/test_on_ray.py`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from lab.tests.engines.test_local import alive, wait_until_gone
from thinwire.engines.events import Event, Restarted
from thinwire.engines.ray_engine import RayEngine
from thinwire.errors import ConfigError, EngineError

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]
PATIENCE_S = 120.0
HOSTS = {"server": {"CPU": 1.0}, "worker 0": {"CPU": 1.0}}


class Up(Event, frozen=True, kw_only=True):
    turn: int


@pytest.fixture
def engine() -> Iterator[RayEngine]:
    with RayEngine([Up], HOSTS) as engine:
        yield engine


def up(turn: int, then: str = "") -> list[str]:
    return [sys.executable, "-c", f"import time; print({Up(turn=turn).line()!r}, flush=True); {then or 'pass'}"]


FOREVER = "time.sleep(600)"


def test_a_killed_actor_comes_back_with_another_command_until_its_restarts_are_used_up(engine: RayEngine) -> None:
    assert engine.listen_at("server") == "127.0.0.1:0"
    later: list[list[str]] = [up(3), up(2, FOREVER)]
    engine.start("server", up(0), host="server")
    engine.start("worker 0", up(1, FOREVER), host="worker 0", restarts=2, again=later.pop)
    assert engine.wait_for("worker 0", Up, PATIENCE_S) == Up(turn=1)
    kill: list[Callable[[], int]] = [lambda: engine.pids["worker 0"], lambda: engine.actor_pids["worker 0"]]
    seen: list[tuple[str, Event]] = []
    orphan = engine.pids["worker 0"]
    os.kill(kill.pop()(), signal.SIGKILL)  # the actor, then the process beside it
    for name, event in engine.events():
        seen.append((name, event))
        if event == Up(turn=2):
            assert wait_until_gone([orphan]) == [], "it dies with its actor"
            os.kill(kill.pop()(), signal.SIGKILL)
    assert ("server", Up(turn=0)) in seen and ("worker 0", Up(turn=3)) in seen
    assert [event.left for _, event in seen if isinstance(event, Restarted)] == [1, 0]


def test_who_fails_for_good_ends_the_run_with_its_last_lines(engine: RayEngine) -> None:
    engine.start("server", up(0, FOREVER), host="server")
    engine.wait_for("server", Up, PATIENCE_S)
    server = engine.pids["server"]
    engine.start("worker 0", up(1, "raise SystemExit('no such data')"), host="worker 0", restarts=1)
    with pytest.raises(EngineError, match=r"(?s)worker 0 ended with exit status 1; last lines:.*no such data.*server"):
        list(engine.events())
    assert not alive(server)


def test_a_second_stop_connects_to_no_other_ray(engine: RayEngine) -> None:
    ray = pytest.importorskip("ray")
    engine.start("server", up(0, FOREVER), host="server")
    engine.wait_for("server", Up, PATIENCE_S)
    for _ in range(2):
        engine.stop()
        assert not ray.is_initialized()


def test_several_nodes_need_certificates() -> None:
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    cluster = cluster_utils.Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        with pytest.raises(ConfigError, match=r"who listens there needs certificates: --certs DIR.*--insecure goes"):
            RayEngine([Up], HOSTS, address=cluster.address)
        with RayEngine([Up], HOSTS, address=cluster.address, insecure=True) as engine:
            assert not engine.listen_at("server").startswith("127.0.0.1:")
            engine.start("server", up(0), host="server")
            assert list(engine.events()) == [("server", Up(turn=0))]
    finally:
        cluster.shutdown()


def test_an_actor_that_ray_gives_up_is_told_of_in_rays_words(engine: RayEngine) -> None:
    engine.start("server", up(0, FOREVER), host="server")
    engine.wait_for("server", Up, PATIENCE_S)
    os.kill(engine.actor_pids["server"], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"(?s)server was killed.*the Ray actor died"):
        list(engine.events())
