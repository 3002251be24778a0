"""A connection's queue of packets for the worker, and the error that ended it. Taking from it blocks."""

from __future__ import annotations

import threading
from collections import deque

from thinwire.errors import DeadlineError, TransportError
from thinwire.transports.base import wire_nbytes


class Inbox:
    """The queued packets of one connection. Any thread may call it.

    It ends when this end leaves, or when the transport finishes it, with an error or without; both may happen.

    Args:
        address: of the server, for messages to people.
        limit_nbytes: with so many bytes the inbox is full, as `wire_nbytes` counts them. A full inbox still takes
            packets; see `wait_for_room`.

    Attributes:
        changed: notified of every packet, of room and of an end; its reentrant lock guards all other attributes.
        nbytes: of the queued packets.
        left: whether this end has left.
        over: whether the session is finished.
        error: the first error that ended the session, if any.

    >>> inbox = Inbox("10.0.0.1:7070", limit_nbytes=1000)
    >>> inbox.put(b"abc")
    >>> inbox.finish("lost the server at 10.0.0.1:7070")
    >>> inbox.take(timeout_s=0)
    b'abc'
    >>> inbox.take(timeout_s=0)
    Traceback (most recent call last):
        ...
    thinwire.errors.TransportError: lost the server at 10.0.0.1:7070
    """

    def __init__(self, address: str, limit_nbytes: int) -> None:
        self.changed = threading.Condition()
        self.nbytes = 0
        self.left = self.over = False
        self.error: str | None = None
        self._address, self._limit_nbytes = address, limit_nbytes
        self._packets: deque[bytes] = deque()

    @property
    def ended(self) -> bool:
        """Whether either end has ended the session."""
        return self.left or self.over

    def put(self, packet: bytes) -> None:
        """Adds a packet; after the end it is dropped."""
        with self.changed:
            if not self.ended:
                self._packets.append(packet)
                self.nbytes += wire_nbytes(packet)
                self.changed.notify_all()

    def take(self, timeout_s: float | None) -> bytes | None:
        """Returns the next packet, or None after an end without error, as `Connection.receive`.

        Args:
            timeout_s: longest wait, in seconds; None waits without limit, 0 does not wait.

        Raises:
            DeadlineError: no packet came in time.
            TransportError: the session broke, or this end has left it.
        """
        with self.changed:
            if not self.changed.wait_for(lambda: self._packets or self.ended, timeout_s):
                raise DeadlineError(f"nothing came from {self._address} within {timeout_s} s")
            if self._packets:
                packet = self._packets.popleft()
                self.nbytes -= wire_nbytes(packet)
                self.changed.notify_all()
                return packet
            if self.error is not None:
                raise TransportError(self.error)
            return None

    def wait_for_room(self) -> None:
        """Waits until the inbox is not full, or this end has left."""
        with self.changed:
            self.changed.wait_for(lambda: self.nbytes < self._limit_nbytes or self.left)

    def check_open(self) -> None:
        """Raises TransportError once the session has ended: the other end receives no more packets."""
        if self.ended:
            raise TransportError(self.error or f"the session with {self._address} has ended")

    def leave(self) -> bool:
        """Ends the session at this end and drops queued packets. Returns whether the session was still open."""
        with self.changed:
            went_on = not self.ended
            # Before the flags, which threads with other locks read.
            self.error = self.error or f"this end has closed the session with {self._address}"
            self.left = True
            self._packets.clear()
            self.nbytes = 0
            self.changed.notify_all()
            return went_on

    def finish(self, error: str | None) -> None:
        """Ends the session at the transport, with an error or None; queued packets may still be received."""
        with self.changed:
            self.error = self.error or error
            self.over = True
            self.changed.notify_all()
