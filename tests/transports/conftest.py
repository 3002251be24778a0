"""A small cluster over any transport, with a handler that records its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from thinwire.transports.base import Connection, Sender, Server
from thinwire.transports.grpc import GrpcOptions
from thinwire.transports.grpc.client import connect
from thinwire.transports.grpc.server import serve
from thinwire.transports.memory import MemoryServer

PATIENCE_S = 20.0  # for what must happen; never waited for in a test that passes

React = Callable[[Sender, int, bytes], None]


class Recorder:
    """A handler that records every call, and answers by a given function."""

    server: Server

    def __init__(self, sender: Sender, react: React) -> None:
        self.sender = sender
        self.events: list[tuple[Any, ...]] = []
        self._react = react
        self._changed = threading.Condition()

    def opened(self, peer: int) -> None:
        self._log("opened", peer)

    def received(self, peer: int, packet: bytes) -> None:
        self._log("received", peer, packet)
        self._react(self.sender, peer, packet)

    def closed(self, peer: int, error: str | None) -> None:
        self._log("closed", peer, error)

    def packets(self, peer: int = 0) -> list[bytes]:
        return [event[2] for event in list(self.events) if event[:2] == ("received", peer)]

    def wait_closed(self, peer: int = 0) -> str | None:
        """Waits until a peer's session is over, and returns what broke it."""
        event = self.wait(lambda: next((e for e in self.events if e[:2] == ("closed", peer)), None))
        error: str | None = event[2]
        return error

    def wait(self, condition: Callable[[], Any]) -> Any:
        with self._changed:
            found = self._changed.wait_for(condition, PATIENCE_S)
        assert found, f"did not happen; events: {[event[:2] for event in self.events]}"
        return found

    def _log(self, *event: Any) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()


def echo(sender: Sender, peer: int, packet: bytes) -> None:
    sender.send(peer, packet)


class Idle:
    """A handler that does nothing."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender

    def opened(self, peer: int) -> None: ...

    def received(self, peer: int, packet: bytes) -> None: ...

    def closed(self, peer: int, error: str | None) -> None: ...


class Echo(Idle):
    """A handler that answers every packet with itself."""

    def received(self, peer: int, packet: bytes) -> None:
        self.sender.send(peer, packet)


class Cluster:
    """One server and its workers over the transport of that name. To enrol a transport, add a line here."""

    TRANSPORTS = ("memory", "grpc")

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.options: dict[str, Any] = {}
        self.server: Server
        self._connections: list[Connection] = []

    def serve(self, react: React = echo, **options: Any) -> Recorder:
        made: list[Recorder] = []

        def factory(sender: Sender) -> Recorder:
            made.append(Recorder(sender, react))
            return made[0]

        self.options = dict(options)
        if self.transport == "memory":
            self.server = MemoryServer(factory, **options)
        else:
            self.server = serve(factory, "127.0.0.1:0", options=GrpcOptions(**self.options))
        made[0].server = self.server
        return made[0]

    def connect(self) -> Connection:
        connection: Connection
        if self.transport == "memory":
            assert isinstance(self.server, MemoryServer)
            connection = self.server.connect()
        else:
            connection = connect(self.server.address, options=GrpcOptions(**self.options))
        self._connections.append(connection)
        return connection

    def tear_down(self) -> None:
        for connection in self._connections:
            connection.abort()
        if hasattr(self, "server"):
            self.server.stop(grace_s=0)


@pytest.fixture(params=Cluster.TRANSPORTS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(request.param)
    yield cluster
    cluster.tear_down()


@pytest.fixture
def grpc_cluster() -> Iterator[Cluster]:
    cluster = Cluster("grpc")
    yield cluster
    cluster.tear_down()
