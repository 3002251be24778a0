"""A whole cluster in one process: sessions without sockets, for tests and for the shortest way in.

Strategy: a packet is handed over as the object it is. What happens at the server is a queue of calls;
whichever thread adds to an idle queue works it off, so the handler needs no thread of its own and is
never entered twice. With one thread everything happens in the order of the program, so a run repeats
exactly. Bytes are counted as if they had travelled over gRPC.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from thinwire.errors import TransportError
from thinwire.transports.base import (
    MAX_MESSAGE_NBYTES,
    MAX_PENDING_NBYTES,
    Connection,
    Handler,
    HandlerFactory,
    Sender,
    Server,
    check_packet,
    wire_nbytes,
)
from thinwire.transports.inbox import Inbox


class MemoryServer(Server):
    """A server that lives in this process; `connect` begins a session with it.

    Args:
        handler_factory: Called once with the sender; returns the handler.
        address: A name for messages to people.
        max_message_nbytes: Largest packet, in bytes.
        max_pending_nbytes: Bytes that may wait for one peer before its session breaks.

    >>> class Echo:
    ...     def __init__(self, sender): self.sender = sender
    ...     def opened(self, peer): pass
    ...     def received(self, peer, packet): self.sender.send(peer, packet)
    ...     def closed(self, peer, error): pass
    >>> with MemoryServer(Echo) as server, server.connect() as connection:
    ...     connection.send(b"abc")
    ...     connection.receive(timeout_s=1)
    b'abc'
    """

    def __init__(
        self,
        handler_factory: HandlerFactory,
        address: str = "memory",
        *,
        max_message_nbytes: int = MAX_MESSAGE_NBYTES,
        max_pending_nbytes: int = MAX_PENDING_NBYTES,
    ) -> None:
        self.address = address
        self.max_message_nbytes, self.max_pending_nbytes = max_message_nbytes, max_pending_nbytes
        self._calls: deque[tuple[Callable[[], None], bool]] = deque()
        self._calls_lock = threading.Lock()
        self._working = False
        self._num_opened = 0
        self._sessions: dict[int, MemoryConnection] = {}
        self._accepting = True
        self._stopped = threading.Event()
        self._failure: Exception | None = None
        self._handler: Handler = handler_factory(_MemorySender(self))

    def connect(self) -> Connection:
        """Begins a session.

        Raises:
            TransportError: The server has stopped.
        """
        connection = MemoryConnection(self)

        def open_session() -> None:
            if not self._accepting:
                connection.finish(f"no server at {self.address}: it has stopped")
                return
            connection.peer = self._num_opened
            self._num_opened += 1
            self._sessions[connection.peer] = connection
            self._handler.opened(connection.peer)

        self.post(open_session, always=True)
        if not self._accepting:
            raise TransportError(f"no server at {self.address}: it has stopped")
        return connection

    def stop(self, grace_s: float = 5.0) -> None:
        error = None if grace_s > 0 else f"the server at {self.address} went away"

        def end_all() -> None:
            self._accepting = False
            for peer in list(self._sessions):
                self.end(peer, error)
            self.post(self._stopped.set)  # after the handler has heard of the ends

        self.post(end_all)
        self._stopped.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        stopped = self._stopped.wait(timeout_s)
        if stopped and self._failure is not None:
            raise self._failure
        return stopped

    def post(self, call: Callable[[], None], *, always: bool = False) -> None:
        """Queues a call of the handler, and works the queue off unless another thread is at it.

        Args:
            call: what to do.
            always: the call is made although the handler has failed.
        """
        with self._calls_lock:
            self._calls.append((call, always))
            if self._working:
                return
            self._working = True
        try:
            self._work_off()
        except BaseException as error:  # Ctrl-C, in the middle of whatever the handler was at
            self._fail(TransportError(f"it was interrupted by {type(error).__name__}"))
            self._work_off()
            raise

    def _work_off(self) -> None:
        while True:
            with self._calls_lock:
                if not self._calls:
                    self._working = False
                    return
                call, always = self._calls.popleft()
            if always or self._failure is None:
                try:
                    call()
                except Exception as error:
                    self._fail(error)

    def call(self, callback: Callable[[], None]) -> None:
        """Runs `callback` between two calls of the handler; nothing after the server has stopped."""
        self.post(lambda: None if self._stopped.is_set() else callback())

    def session(self, peer: int) -> MemoryConnection | None:
        """Returns the open session of a peer, if there is one."""
        return self._sessions.get(peer)

    def deliver(self, peer: int, packet: bytes) -> None:
        """Hands a packet from a peer to the handler, unless its session is over."""
        if (connection := self._sessions.get(peer)) is not None:
            self.bytes_received += wire_nbytes(packet)
            if connection.limit is not None and len(packet) > connection.limit[0]:
                connection.limit[1]()
            else:
                self._handler.received(peer, packet)

    def end(self, peer: int, error: str | None) -> None:
        """Ends a session on both sides; does nothing if it is over."""
        # The handler may be inside one of its methods: it hears of the end after that.
        if self._finish(peer, error):
            self.post(lambda: self._handler.closed(peer, error))

    def left(self, peer: int, error: str | None) -> None:
        """Ends a session that its peer has left. The handler hears of it before whoever comes next, in its place."""
        if self._finish(peer, error):
            self._handler.closed(peer, error)

    def _finish(self, peer: int, error: str | None) -> bool:
        connection = self._sessions.pop(peer, None)
        if connection is not None:
            connection.finish(error)
        return connection is not None

    def _fail(self, error: Exception) -> None:
        """The handler broke: what it knows can no longer be trusted, so it is not called again."""
        self._failure = self._failure or error
        self._accepting = False
        for connection in self._sessions.values():
            connection.finish(f"the server at {self.address} failed: {type(error).__name__}: {error}")
        self._sessions.clear()
        self._stopped.set()


class _MemorySender(Sender):
    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    def send(self, peer: int, packet: bytes) -> None:
        check_packet(packet, self._server.max_message_nbytes)
        connection = self._server.session(peer)
        if connection is None:
            return
        if connection.offer(packet):
            self._server.bytes_sent += wire_nbytes(packet)
        else:
            limit = connection.max_pending_nbytes
            self._server.end(peer, f"peer {peer} does not read: over {limit} bytes pending")

    def close(self, peer: int, packet: bytes | None = None) -> None:
        if packet is not None:
            self.send(peer, packet)
        self._server.end(peer, None)

    def call(self, callback: Callable[[], None]) -> None:
        self._server.call(callback)

    def limit(self, peer: int, nbytes: int, exceeded: Callable[[], None]) -> None:
        connection = self._server.session(peer)
        if connection is not None:
            connection.limit = nbytes, exceeded

    def reserve(self, peer: int, nbytes: int) -> None:
        connection = self._server.session(peer)
        if connection is not None:
            connection.reserve(nbytes)


class Host(Protocol):
    """A server in this process, as connections to it see it."""

    address: str
    bytes_sent: int
    max_message_nbytes: int
    max_pending_nbytes: int

    def post(self, call: Callable[[], None]) -> None:
        """Queues a call among those of the handler."""

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
