"""The packets that a worker has yet to receive, and why no more will come: the half of a connection that blocks."""

from __future__ import annotations

import threading
from collections import deque

from thinwire.errors import DeadlineError, TransportError
from thinwire.transports.base import wire_nbytes


class Inbox:
    """The packets of one connection. Any thread may call it.

    It ends when this end leaves, or when the transport finishes it, with an error or in good order; both may happen.

    Args:
        address: of the server, for messages to people.
        limit_nbytes: with so many bytes the inbox is full, as `wire_nbytes` counts them. It takes what is put all the
            same; see `wait_for_room`.

    Attributes:
        changed: notified of every packet, of room and of an end; its lock, which may be taken again, guards all else.
        nbytes: of the packets that wait.
        left: whether this end has left.
        over: whether the session is finished.
        error: why it ended, where that was not in good order; the first reason stays.

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
        """Whether no more packets are taken, whichever end wanted that."""
        return self.left or self.over

    def put(self, packet: bytes) -> None:
        """Adds a packet; after the end it is dropped."""
        with self.changed:
            if not self.ended:
                self._packets.append(packet)
                self.nbytes += wire_nbytes(packet)
                self.changed.notify_all()

    def take(self, timeout_s: float | None) -> bytes | None:
        """Returns the next packet, or None after an end in good order: what `Connection.receive` promises.

        Args:
            timeout_s: how long to wait, in seconds; None waits for ever, 0 only looks.

        Raises:
            DeadlineError: nothing came in time.
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
        """Raises TransportError once the session has ended: the other end would not receive what is sent."""
        if self.ended:
            raise TransportError(self.error or f"the session with {self._address} has ended")

    def leave(self) -> bool:
        """This end leaves: what waits is dropped. Returns whether the session went on until now."""
        with self.changed:
            went_on = not self.ended
            # Before the flags, which other locks' waiters look at.
            self.error = self.error or f"this end has closed the session with {self._address}"
            self.left = True
            self._packets.clear()
            self.nbytes = 0
            self.changed.notify_all()
            return went_on

    def finish(self, error: str | None) -> None:
        """The session is over, with an error or, where that is None, in good order; what waits may be received."""
        with self.changed:
            self.error = self.error or error
            self.over = True
            self.changed.notify_all()
