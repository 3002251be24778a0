"""What has come for a worker and waits to be received, and why nothing more will: the half of a connection that blocks.

What came before the end is received before the error that ended it; what came before this end left is dropped. How a
full inbox slows the other end down, and what becomes of packets to be sent, is for each transport to say.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from thinwire.errors import DeadlineError, TransportError
from thinwire.transports.base import wire_nbytes


class Inbox:
    """The packets of one connection. Any thread may call it.

    It ends when this end leaves, or when whoever fills it finishes it, with an error or in good order; both may happen,
    in either order.

    Args:
        address: of the server, for messages to people.
        limit_nbytes: with so many bytes the inbox is full, as `wire_nbytes` counts them. It takes what is put all the
            same; whoever fills it asks first, or stops after.
        on_room: called when a full inbox is full no longer, with the lock of `changed` held: it must not block.

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

    def __init__(self, address: str, limit_nbytes: int, on_room: Callable[[], None] = lambda: None) -> None:
        self.changed = threading.Condition()
        self.nbytes = 0
        self.left = self.over = False
        self.error: str | None = None
        self._address, self._limit_nbytes, self._on_room = address, limit_nbytes, on_room
        self._packets: deque[bytes] = deque()

    @property
    def ended(self) -> bool:
        """Whether no more packets are taken, whichever end wanted that."""
        return self.left or self.over

    @property
    def full(self) -> bool:
        """Whether as much waits as may."""
        return self.nbytes >= self._limit_nbytes

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
                packet, was_full = self._packets.popleft(), self.full
                self.nbytes -= wire_nbytes(packet)
                if was_full and not self.full:
                    self.changed.notify_all()
                    self._on_room()
                return packet
            if self.error is not None:
                raise TransportError(self.error)
            return None

    def wait_for_room(self) -> None:
        """Waits until the inbox is not full, or this end has left."""
        with self.changed:
            self.changed.wait_for(lambda: not self.full or self.left)

    def check_open(self) -> None:
        """Raises TransportError once the session has ended: what is sent would reach nobody."""
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
