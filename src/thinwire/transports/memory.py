"""Clusters in one process: sessions without sockets, for tests and first steps.

A queue holds the calls at the server; the thread that adds to an idle queue runs its calls, so the handler needs no
thread and is never entered twice. With one thread all calls have the program's order, so a run repeats exactly. Both
ends count bytes as if they were sent over gRPC.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from thinwire.errors import TransportError
from thinwire.transports.base import (
    MAX_MESSAGE_NBYTES,
    MAX_PENDING_NBYTES,
    UNAUTHENTICATED,
    Connection,
    HandlerFactory,
    check_packet,
    wire_nbytes,
)
from thinwire.transports.hosting import HostServer, Session
from thinwire.transports.inbox import Inbox


class MemoryServer(HostServer):
    """A server that lives in this process; `connect` begins a session with it.

    Args:
        handler_factory: called once with the sender; returns the handler.
        address: a name for messages to people.
        max_message_nbytes: largest packet, in bytes.
        max_pending_nbytes: bytes that may wait for one peer before its session breaks.

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
        super().__init__(max_message_nbytes, max_pending_nbytes)
        self.address = address
        self._calls: deque[Callable[[], None]] = deque()
        self._calls_lock = threading.Lock()
        self._working = False
        self._stopped = threading.Event()
        self._handler = handler_factory(self)

    def connect(self) -> Connection:
        """Begins a session. Raises TransportError where the server has stopped."""
        connection, stopped = MemoryConnection(self), f"no server at {self.address}: it has stopped"

        def open_session() -> None:
            if self._accepting:
                connection.peer = self.begin(connection)
            else:
                connection.inbox.finish(stopped)

        self.post(open_session)
        if not self._accepting:
            raise TransportError(stopped)
        return connection

    def stop(self, grace_s: float = 5.0) -> None:
        error = None if grace_s > 0 else f"the server at {self.address} went away"

        def end_all() -> None:
            self._accepting = False
            for session in list(self._sessions.values()):
                session.end(error)
            self.post(self._stopped.set)  # after the handler's `closed` calls

        self.post(end_all)
        self._stopped.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        stopped = self._stopped.wait(timeout_s)
        if stopped and self._failure is not None:
            raise self._failure
        return stopped

    def post(self, call: Callable[[], None]) -> None:
        """Queues a call, and runs the queue unless another thread does."""
        with self._calls_lock:
            self._calls.append(call)
            if self._working:
                return
            self._working = True
        try:
            self._run_queue()
        except BaseException as error:  # Ctrl-C, during any call
            self._fail(TransportError(f"it was interrupted by {type(error).__name__}"))
            self._run_queue()
            raise

    def _run_queue(self) -> None:
        while True:
            with self._calls_lock:
                if not self._calls:
                    self._working = False
                    return
                call = self._calls.popleft()
            call()

    def call_handler(self, call: Callable[[], None]) -> None:
        if not self._stopped.is_set():
            super().call_handler(call)

    def _stop_failed(self, reason: str) -> None:
        self._accepting = False
        for session in list(self._sessions.values()):
            session.end(reason)
        self._stopped.set()

    # ---- called by sessions

    def deliver(self, session: MemoryConnection, packet: bytes) -> None:
        """Passes a packet to the handler, unless its peer's session is over."""
        if not session.closing:
            self.bytes_received += wire_nbytes(packet)
            fits = len(packet) <= session.limit_nbytes
            self.call_handler(partial(self._handler.received, session.peer, packet) if fits else session.too_large)

    def over(self, session: MemoryConnection, error: str | None, *, left: bool = False) -> None:
        """Ends a session on both sides, unless it is over; `left`: the peer ended it, outside the handler's methods."""
        if self._sessions.pop(session.peer, None) is not None:
            session.inbox.finish(error)
            closed = partial(self._handler.closed, session.peer, error)
            self.call_handler(closed) if left else self.post(lambda: self.call_handler(closed))


class MemoryConnection(Connection, Session):
    """Both ends of a session with a server of this process; `MemoryServer.connect` makes it."""

    def __init__(self, server: MemoryServer) -> None:
        Session.__init__(self, UNAUTHENTICATED, server.max_message_nbytes, server.max_pending_nbytes)
        self.address = server.address
        self.peer = -1  # set when the server opens the session
        self.inbox = Inbox(server.address, server.max_pending_nbytes)
        self._server = server

    # ---- the worker's end

    def send(self, packet: bytes) -> None:
        check_packet(packet, self._server.max_message_nbytes)
        with self.inbox.changed:
            self.inbox.check_open()
            self.bytes_sent += wire_nbytes(packet)
        self._server.post(lambda: self._server.deliver(self, packet))

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        with self.inbox.changed:
            packet = self.inbox.take(timeout_s)
            if packet is not None:
                self.bytes_received += wire_nbytes(packet)
            return packet

    def close(self, timeout_s: float = 30.0) -> None:
        self._leave(None)

    def abort(self) -> None:
        self._leave("the peer went away without saying so")

    def _leave(self, error: str | None) -> None:
        if self.inbox.leave():
            self._server.post(lambda: self._server.over(self, error, left=True))

    # ---- the server's

    @property
    def pending_nbytes(self) -> int:
        return self.inbox.nbytes

    @property
    def closing(self) -> bool:
        return self.inbox.over

    def queue(self, packet: bytes) -> None:
        self.inbox.put(packet)  # dropped if this peer has left; the end of its session is still queued
        self._server.bytes_sent += wire_nbytes(packet)

    def finish(self) -> None:
        self.end(None)

    def end(self, error: str | None) -> None:
        self._server.over(self, error)
