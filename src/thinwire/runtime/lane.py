"""One end of a session that outlives its connections: what it said and the other may not have heard, and what it heard.

Messages are counted, not numbered: they keep their order, so a count says which. This file moves nothing.
"""

from __future__ import annotations

from collections import deque

from thinwire.errors import ProtocolError
from thinwire.transports.base import wire_nbytes

HEARD_MESSAGES = 64
HEARD_NBYTES = 2**20
"""The other end may forget what it said as soon as it is told; after this many messages or bytes it is."""


class Lane:
    """The books of one end.

    Attributes:
        heard: messages that came from the other end.
        forgotten: messages of this end that the other is known to have.
        kept_nbytes: size of what may have to be said again.

    Example:
        >>> lane = Lane()
        >>> for kind in (1, 2, 3):
        ...     lane.say(bytes(kind))
        >>> lane.acknowledge(2)
        >>> lane.unheard
        (b'\x00\x00\x00',)
    """

    def __init__(self) -> None:
        self.heard = self.forgotten = self.kept_nbytes = 0
        self._kept: deque[bytes] = deque()
        self._told_messages = self._told_nbytes = 0

    def say(self, packet: bytes) -> None:
        """Keeps a message that is sent."""
        self._kept.append(packet)
        self.kept_nbytes += wire_nbytes(packet)

    def hear(self, packet: bytes) -> bool:
        """Counts a message that came; returns whether it is time to say so."""
        self.heard += 1
        self._told_messages += 1
        self._told_nbytes += wire_nbytes(packet)
        if self._told_messages < HEARD_MESSAGES and self._told_nbytes < HEARD_NBYTES:
            return False
        self._told_messages = self._told_nbytes = 0
        return True

    def acknowledge(self, count: int) -> None:
        """The other end has heard so many messages, from the beginning of the session.

        Raises:
            ProtocolError: fewer than it said before, or more than there were.
        """
        if not self.forgotten <= count <= self.forgotten + len(self._kept):
            raise ProtocolError(
                f"the other end has heard {count} messages; between {self.forgotten} and "
                f"{self.forgotten + len(self._kept)} are possible"
            )
        while self.forgotten < count:
            self.kept_nbytes -= wire_nbytes(self._kept.popleft())
            self.forgotten += 1

    @property
    def unheard(self) -> tuple[bytes, ...]:
        """What the other end may not have heard, in order."""
        return tuple(self._kept)
