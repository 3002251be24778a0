"""A server that answers numbers with numbers, and workers with connections that tests can cut."""

from __future__ import annotations

from tests.packets.bytes_of import packet
from thinwire.packets import kind_of
from thinwire.runtime.connection import ReconnectingConnection
from thinwire.runtime.session_server import SessionServer
from thinwire.schema import Leave
from thinwire.transports.base import Connection, Sender
from thinwire.transports.memory import MemoryServer


def numbered(number: int) -> bytes:
    """A packet that the handler understands: the number as text."""
    return packet(kind=200, message=str(number).encode(), frames=())


def number_in(data: bytes | None) -> int:
    assert data is not None
    return int(data[20:])


class Echo:
    """Answers message n with messages 2n and 2n + 1, and records all calls."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.received_numbers: list[int] = []
        self.ends: list[tuple[int, str | None]] = []
        self.breaks: list[tuple[int, str]] = []

    def opened(self, peer: int) -> None:
        pass

    def received(self, peer: int, data: bytes) -> None:
        if kind_of(data) is Leave:
            self.sender.close(peer)
            return
        number = number_in(data)
        self.received_numbers.append(number)
        for answer in (2 * number, 2 * number + 1):
            self.sender.send(peer, numbered(answer))

    def closed(self, peer: int, error: str | None) -> None:
        self.ends.append((peer, error))

    def interrupted(self, peer: int) -> bool:
        self.breaks.append((peer, "interrupted"))
        return True

    def resumed(self, peer: int) -> None:
        self.breaks.append((peer, "resumed"))


class Cluster:
    """A session server over memory."""

    def __init__(self, grace_s: float = 30.0) -> None:
        self.echo: Echo
        self.sessions: SessionServer

        def make(sender: Sender) -> Echo:
            self.echo = Echo(sender)
            return self.echo

        def serve(sender: Sender) -> SessionServer:
            self.sessions = SessionServer(make, sender, grace_s)
            return self.sessions

        self.server = MemoryServer(serve)
        self.connections: list[Connection] = []

    def connect(self, _timeout_s: float = 1.0) -> Connection:
        self.connections.append(self.server.connect())
        return self.connections[-1]

    def worker(self, reconnect_s: float = 30.0) -> ReconnectingConnection:
        return ReconnectingConnection(self.connect, connect_timeout_s=1, reconnect_s=reconnect_s)

    def cut(self) -> None:
        """Ends the newest connection with an error on the server's side."""
        connection = self.connections[-1]
        self.server.post(lambda: connection.end("cut"))  # type: ignore[attr-defined]
