"""Who makes the links thin, which nodes cannot be shared, and what is started where, also again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from thinwire.engines.engine import Again, Command, Engine, Role
from thinwire.engines.events import Event, Listening, Restarted
from thinwire.engines.roles import Roles, own_command
from thinwire.errors import ConfigError, EngineError
from thinwire_lab.jobs import cluster
from thinwire_lab.jobs.cluster import Place, choose_links, run_cluster


def test_who_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "available", lambda: (True, ""))
    assert choose_links("10mbit").shaping == "kernel"
    assert choose_links("10mbit", "application").shaping == "application"
    assert choose_links(None).shaping == choose_links("none", "application").shaping == "none"
    assert choose_links(None, "kernel").shaping == "kernel", "asked for: the counters are worth having"
    monkeypatch.setattr(cluster, "available", lambda: (False, "no tc here"))
    links = choose_links("10mbit")
    assert links.shaping == "application" and "no tc here" in links.note, "reported, not silent"
    with pytest.raises(EngineError, match="the kernel cannot shape links here: no tc here"):
        choose_links("10mbit", "kernel")


def test_nodes_that_cannot_be_shared() -> None:
    def shared(servers: int) -> Roles:
        return Roles(workers=2, worker=lambda *_: ["worker"], servers=servers, servers_on_workers=True)

    with pytest.raises(ConfigError, match="application shaping gives each process a link of its own"):
        run_cluster(shared(2), Place(links=choose_links("10mbit", "application")), [], lambda *_: None)
    with pytest.raises(ConfigError, match="3 servers on the nodes of 2 workers"):
        shared(3)
    assert shared(1).hosts == ["worker 0", "worker 1"]
    assert Roles(workers=1, worker=lambda *_: ["worker"], servers=2).hosts == ["server 0", "server 1", "worker 0"]


class Script(Engine[Role]):
    """An engine that starts nothing and reports what it was given; `listening` is where each host is."""

    def __init__(self, listening: dict[str, str], reports: Sequence[tuple[str, Event | int]]) -> None:
        super().__init__()
        self.listening, self.reports = listening, deque(reports)
        self.commands: list[tuple[str, str | None, Command]] = []

    @property
    def pids(self) -> dict[str, int]:
        return {name: number for number, (name, *_) in enumerate(self.commands)}

    def listen_at(self, host: str) -> str:
        return self.listening[host]

    def start(
        self,
        name: str,
        command: Command,
        *,
        host: str | None = None,
        restarts: int = 0,
        again: Again | None = None,
        optional: bool = False,
    ) -> None:
        assert again is not None
        self.commands.append((name, host, command))
        self._roles[name] = Role(name, again, restarts, optional)

    def stop(self) -> None:
        pass

    def receive(self, timeout_s: float | None) -> tuple[str, Event | int] | None:
        if not self.reports:
            return None
        name, came = self.reports.popleft()
        self._roles[name].status = came if isinstance(came, int) else None
        return name, came

    def _start_again(self, role: Role, command: Command) -> None:
        role.status = None
        role.restarts -= 1
        self.commands.append((role.name, None, command))


def test_who_is_started_again_finds_the_others_where_they_are_now() -> None:
    """A server listens where it did; one on another machine now where that is, and a worker is then sent there."""
    reports: list[tuple[str, Event | int]] = [
        ("server 0", Listening(address="10.0.0.1:7000")),
        ("server 0", 1),
        ("server 0", Listening(address="10.0.0.1:7000")),
        ("server 0", 1),
        ("server 0", Listening(address="10.0.0.9:7001")),
        ("worker 0", 1),
        ("worker 0", 0),
    ]
    engines: list[Script] = []

    @contextmanager
    def opened(kinds: Sequence[type[Event]], hosts: Sequence[str]) -> Iterator[Script]:
        assert kinds == [Listening] and hosts == ["server 0", "worker 0"]
        engines.append(Script({"server 0": "10.0.0.1:0"}, reports))
        yield engines[0]

    def on_event(process: str, event: Event) -> None:
        if isinstance(event, Restarted) and event.left == 2:
            engines[0].listening["server 0"] = "10.0.0.9:0"

    roles = Roles(
        workers=1,
        worker=lambda rank, addresses, again: ["worker", *addresses, *(["again"] if again else [])],
        server=lambda index, again: ["server", *(["again"] if again else [])],
        servers_return=True,
        max_restarts=3,
    )
    place = Place(
        links=choose_links("10mbit", "application"), open_engine=opened, private=lambda rank: [f"--for={rank}"]
    )
    pids: dict[str, int] = {}
    assert run_cluster(roles, place, [], on_event, on_start=pids.update) == {}
    servers, workers = ["--events", "--shape", "10mbit", "--for=None"], ["--events", "--shape", "10mbit", "--for=0"]
    assert pids == {"server 0": 0, "worker 0": 1}
    assert engines[0].commands == [
        ("server 0", "server 0", own_command("server", "--listen", "10.0.0.1:0", *servers)),
        ("worker 0", "worker 0", own_command("worker", "10.0.0.1:7000", *workers)),
        ("server 0", None, own_command("server", "again", "--listen", "10.0.0.1:7000", *servers)),
        ("server 0", None, own_command("server", "again", "--listen", "10.0.0.9:0", *servers)),
        ("worker 0", None, own_command("worker", "10.0.0.9:7001", "again", *workers)),
    ]


