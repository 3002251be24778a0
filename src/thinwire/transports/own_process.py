"""A session without a socket: a worker and its server in one process hand packets over as the objects they are.

Connections count bytes as if they had travelled over gRPC; a server does where it has no other sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from thinwire.transports.base import Connection, Identity, check_packet, wire_nbytes
from thinwire.transports.inbox import Inbox


class Host(Protocol):
    """A server in this process, as connections to it see it."""

    address: str
    max_message_nbytes: int
    max_pending_nbytes: int

    def post(self, call: Callable[[], None]) -> None:
        """Queues a call among those of the handler."""

    def count_own(self, *, sent: int) -> None:
        """Hears of bytes that a session of this process was sent."""

    def deliver(self, peer: int, packet: bytes) -> None:
        """Hands a packet from a peer to the handler, unless its session is over."""

    def end(self, peer: int, error: str | None) -> None:
        """Ends a session on both sides; does nothing if it is over."""

    def left(self, peer: int, error: str | None) -> None:
        """Ends a session that its peer has left; does nothing if it is over. Called on the handler's thread."""


class MemoryConnection(Connection):
    """The worker's end of a session with a server of its own process; made by the server's `connect`."""

    def __init__(self, server: Host) -> None:
        self.address = server.address
        self.peer = -1  # given when the server opens the session
        self.limit: tuple[int, Callable[[], None]] | None = None
        self._server = server
        self.max_pending_nbytes = server.max_pending_nbytes
        self._inbox = Inbox(server.address, server.max_pending_nbytes)

    def send(self, packet: bytes) -> None:
        check_packet(packet, self._server.max_message_nbytes)
        with self._inbox.changed:
            self._inbox.check_open()
            self.bytes_sent += wire_nbytes(packet)
        self._server.post(lambda: self._server.deliver(self.peer, packet))

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        with self._inbox.changed:
            packet = self._inbox.take(timeout_s)
            if packet is not None:
                self.bytes_received += wire_nbytes(packet)
            return packet

    def close(self, timeout_s: float = 30.0) -> None:
        self._leave(None)

    def abort(self) -> None:
        self._leave("the peer went away without saying so")

    def _leave(self, error: str | None) -> None:
        if self._inbox.leave():
            self._server.post(lambda: self._server.left(self.peer, error))

    def offer(self, packet: bytes) -> bool:
        """Queues a packet for this peer; returns False if too much is pending."""
        with self._inbox.changed:
            pending_nbytes = self._inbox.nbytes
            full = pending_nbytes + wire_nbytes(packet) > self.max_pending_nbytes
            if full and pending_nbytes and not self._inbox.ended:
                return False
            self._inbox.put(packet)  # dropped if this peer has left; its goodbye is on the way
            return True

    def reserve(self, nbytes: int) -> None:
        """See `Sender.reserve`."""
        self.max_pending_nbytes = max(self.max_pending_nbytes, nbytes)

    def finish(self, error: str | None) -> None:
        """The server ended the session: what is in the inbox may still be received."""
        self._inbox.finish(error)


class OwnSession:
    """A session of this process, at the server."""

    def __init__(self, host: Host, connection: MemoryConnection, identity: Identity) -> None:
        self.identity = identity
        self.closing = False
        self.limit_nbytes = host.max_message_nbytes
        self.exceeded: Callable[[], None] = self.close
        self._host, self._connection = host, connection

    def put(self, packet: bytes) -> None:
        """Hands a packet over, or ends the session if too much is pending."""
        if self._connection.offer(packet):
            self._host.count_own(sent=wire_nbytes(packet))
        else:
            limit = self._connection.max_pending_nbytes
            self._host.end(self._connection.peer, f"the worker does not read: over {limit} bytes pending")

    def limit(self, nbytes: int, exceeded: Callable[[], None]) -> None:
        """See `Sender.limit`; what is larger than the message limit never comes."""
        self.limit_nbytes, self.exceeded = nbytes, exceeded

    def reserve(self, nbytes: int) -> None:
        """See `Sender.reserve`."""
        self._connection.reserve(nbytes)

    def close(self) -> None:
        """Ends the session in good order."""
        self._host.end(self._connection.peer, None)

    def end(self, error: str | None) -> None:
        """Takes no more packets, and says so."""
        self.closing = True
        self._connection.finish(error)
