"""A whole cluster in one process: sessions without sockets, for tests and for the shortest way in.

Strategy: what happens at the server is a queue of calls; whichever thread adds to an idle queue works it off, so the
handler needs no thread of its own and is never entered twice. With one thread everything happens in the order of the
program, so a run repeats exactly.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from thinwire.errors import TransportError
from thinwire.transports.base import (
    MAX_MESSAGE_NBYTES,
    MAX_PENDING_NBYTES,
    HandlerFactory,
)
from thinwire.transports.hosting import HostSender, HostServer


class MemoryServer(HostServer):
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
        super().__init__(max_message_nbytes, max_pending_nbytes)
        self.address = address
        self._calls: deque[Callable[[], None]] = deque()
        self._calls_lock = threading.Lock()
        self._working = False
        self._stopped = threading.Event()
        self._handler = handler_factory(HostSender(self))

    def count_own(self, *, sent: int = 0, received: int = 0) -> None:
        super().count_own(sent=sent, received=received)
        self.bytes_sent += sent  # all that there is passes for a wire here
        self.bytes_received += received

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

    def post(self, call: Callable[[], None]) -> None:
        """Queues a call, and works the queue off unless another thread is at it."""
        with self._calls_lock:
            self._calls.append(call)
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
                call = self._calls.popleft()
            call()

    def tell(self, call: Callable[[], None]) -> None:
        if not self._stopped.is_set():
            super().tell(call)

    def _stop_failed(self, reason: str) -> None:
        self._accepting = False
        for session in self._sessions.values():
            session.end(reason)
        self._sessions.clear()
        self._stopped.set()
