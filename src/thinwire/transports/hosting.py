"""What servers of all wires have in common: their peers' sessions, and the handler that is told of them.

A peer may be of this very process: its packets are handed over, and pass no socket.
"""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

from thinwire.errors import ConfigError, ProtocolError, TransportError
from thinwire.transports.base import (
    ANYBODY,
    Connection,
    Handler,
    Identity,
    Sender,
    Server,
    check_packet,
    wire_nbytes,
)
from thinwire.transports.own_process import MemoryConnection, OwnSession

_log = logging.getLogger(__name__)

MAX_SESSIONS = 4096
MAX_SESSIONS_EACH = 8
"""Of one certificate or token that is for one rank: an old one that is not yet known to be dead, and its heirs."""


class Session(Protocol):
    """One peer of a server, while packets may still be queued for it.

    Attributes:
        identity: what it has proved of itself.
    """

    identity: Identity

    @property
    def closing(self) -> bool:
        """Whether it takes no more packets."""
        ...

    def put(self, packet: bytes) -> None:
        """Queues a packet, or ends the session if too much is pending."""

    def limit(self, nbytes: int, exceeded: Callable[[], None]) -> None:
        """See `Sender.limit`."""

    def reserve(self, nbytes: int) -> None:
        """See `Sender.reserve`."""

    def close(self) -> None:
        """Takes no more packets; the session ends in good order when the last is sent."""

    def end(self, error: str | None) -> None:
        """Ends the session now, unless it is over already."""


class WireSession(Session):
    """A session that passes a socket: what may wait for its peer, and what its peer may send.

    Args:
        identity: what it has proved of itself.
        max_message_nbytes: largest packet that it may send, in bytes.
        max_pending_nbytes: bytes that may wait to be sent to it.

    Attributes:
        limit_nbytes: largest packet that it may send now.
        too_large: to be told to the handler where a larger one comes.
        pending_nbytes: what waits, as `wire_nbytes` counts it; whoever sends it takes it off.
    """

    def __init__(self, identity: Identity, max_message_nbytes: int, max_pending_nbytes: int) -> None:
        self.identity = identity
        self.limit_nbytes = self._max_message_nbytes = max_message_nbytes
        self.too_large: Callable[[], None] = self._say_too_large
        self.pending_nbytes, self._max_pending_nbytes = 0, max_pending_nbytes

    def put(self, packet: bytes) -> None:
        nbytes, limit = wire_nbytes(packet), self._max_pending_nbytes
        if self.pending_nbytes and self.pending_nbytes + nbytes > limit:
            self.end(f"the worker does not read: over {limit} bytes pending")
            return
        self.pending_nbytes += nbytes
        self._queue(packet)

    @abstractmethod
    def _queue(self, packet: bytes) -> None:
        """Sends a packet after those that wait."""

    def limit(self, nbytes: int, exceeded: Callable[[], None]) -> None:
        most = self._max_message_nbytes  # which stays
        self.limit_nbytes, self.too_large = min(nbytes, most), exceeded if nbytes < most else self._say_too_large

    def reserve(self, nbytes: int) -> None:
        self._max_pending_nbytes = max(self._max_pending_nbytes, nbytes)

    def _say_too_large(self) -> None:
        most = self._max_message_nbytes
        self.end(f"a packet over the message limit of {most} bytes came; raise max_message_nbytes on both sides")


class HostServer(Server):
    """A server whose handler runs on one thread, the server's.

    Args:
        max_message_nbytes: largest packet, in bytes.
        max_pending_nbytes: bytes that may wait to be sent to one peer.
    """

    _handler: Handler

    def __init__(self, max_message_nbytes: int, max_pending_nbytes: int) -> None:
        self.max_message_nbytes, self.max_pending_nbytes = max_message_nbytes, max_pending_nbytes
        self._sessions: dict[int, Session] = {}
        self._num_opened = 0
        self._accepting = True
        self._failure: Exception | None = None
        self._warned = -math.inf

    @abstractmethod
    def post(self, call: Callable[[], None]) -> None:
        """Runs `call` on the server's thread, unless the server is gone. For any thread."""

    @abstractmethod
    def _stop_failed(self, reason: str) -> None:
        """The handler has failed: accepts no more sessions, ends all with the reason, and stops."""

    def connect(self, identity: Identity = ANYBODY) -> Connection:
        """Begins a session of this very process.

        Args:
            identity: what the handler is told of the peer.

        Raises:
            TransportError: the server has stopped.
        """
        connection, stopped = MemoryConnection(self), f"no server at {self.address}: it has stopped"

        def open_session() -> None:
            if not self._accepting:
                connection.finish(stopped)
                return
            connection.peer = self.number()
            self._sessions[connection.peer] = OwnSession(self, connection, identity)
            self.tell(lambda: self._handler.opened(connection.peer))

        self.post(open_session)
        if not self._accepting:
            raise TransportError(stopped)
        return connection

    def number(self) -> int:
        """Returns the next peer's number."""
        self._num_opened += 1
        return self._num_opened - 1

    def tell(self, call: Callable[[], None]) -> None:
        """Calls into the handler. What it raises is a bug: it is not called again, and the server stops."""
        if self._failure is not None:
            return
        try:
            call()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """What the handler knows can no longer be trusted."""
        self._failure = self._failure or error
        self._stop_failed(f"the server failed: {type(error).__name__}: {error}")

    def deliver(self, peer: int, packet: bytes) -> None:
        """Hands a packet of this process to the handler, unless its peer's session is over."""
        session = self.session(peer)
        if isinstance(session, OwnSession):
            self.count_own(received=wire_nbytes(packet))
            fits = len(packet) <= session.limit_nbytes
            self.tell(partial(self._handler.received, peer, packet) if fits else session.exceeded)

    def count_own(self, *, sent: int = 0, received: int = 0) -> None:
        """Hears of bytes of a session of this process; they pass no wire, and are not counted."""

    def end(self, peer: int, error: str | None) -> None:
        """Ends a session of this process; does nothing if it is over."""
        # The handler may be inside one of its methods: it hears of the end after that.
        if self._finish(peer, error):
            self.post(lambda: self.tell(lambda: self._handler.closed(peer, error)))

    def left(self, peer: int, error: str | None) -> None:
        """Ends a session of this process that its peer has left; does nothing if it is over.

        The handler is in none of its methods then, and hears of it before whoever comes next, in its place.
        """
        if self._finish(peer, error):
            self.tell(lambda: self._handler.closed(peer, error))

    def _finish(self, peer: int, error: str | None) -> bool:
        session = self._sessions.get(peer)
        if not isinstance(session, OwnSession):
            return False
        session.end(error)
        del self._sessions[peer]
        return True

    def session(self, peer: int) -> Session | None:
        """Returns the session of a peer while packets may still be queued for it."""
        session = self._sessions.get(peer)
        return None if session is None or session.closing else session

    def identity(self, peer: int) -> Identity:
        """Returns who a peer has proved to be; `ANYBODY` once it has gone."""
        session = self._sessions.get(peer)
        return ANYBODY if session is None else session.identity

    def _warn(self, who: object, stranger: ProtocolError) -> None:
        """Tells whoever runs the server of a caller that is not let in, once a second at most.

        Why the server's own files are at fault is for its log alone.
        """
        if (now := time.monotonic()) - self._warned >= 1.0:
            self._warned = now
            fault = f": {cause}" if isinstance(cause := stranger.__cause__, ConfigError) else ""
            _log.warning("%s was not let in: %s%s", who, stranger, fault)

    def _is_full(self, identity: Identity) -> str | None:
        """Says why there is no room for another session, if there is none."""
        if len(self._sessions) >= MAX_SESSIONS:
            return f"the server has {MAX_SESSIONS} sessions, and takes no more"
        own = 0 if identity.rank is None else sum(each.identity == identity for each in self._sessions.values())
        if own >= MAX_SESSIONS_EACH:
            return f"rank {identity.rank} has {own} sessions with the server, and may have no more"
        return None


class HostSender(Sender):
    """The sender of such a server's handler."""

    def __init__(self, server: HostServer) -> None:
        self._server = server

    def send(self, peer: int, packet: bytes) -> None:
        check_packet(packet, self._server.max_message_nbytes)
        session = self._server.session(peer)
        if session is not None:
            session.put(packet)

    def close(self, peer: int, packet: bytes | None = None) -> None:
        if packet is not None:
            self.send(peer, packet)
        session = self._server.session(peer)
        if session is not None:
            session.close()

    def call(self, callback: Callable[[], None]) -> None:
        self._server.post(lambda: self._server.tell(callback))

    def limit(self, peer: int, nbytes: int, exceeded: Callable[[], None]) -> None:
        session = self._server.session(peer)
        if session is not None:
            session.limit(nbytes, exceeded)

    def reserve(self, peer: int, nbytes: int) -> None:
        session = self._server.session(peer)
        if session is not None:
            session.reserve(nbytes)

    def identity(self, peer: int) -> Identity:
        return self._server.identity(peer)
