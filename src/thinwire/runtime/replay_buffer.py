"""One end of a session that outlives its connections: what it sent and may have to send again, and what it received.

Messages are counted, not numbered: they keep their order, so a count says which. This file moves nothing.
"""

from __future__ import annotations

from collections import deque

from thinwire.errors import ProtocolError
from thinwire.transports.base import wire_nbytes

ACKNOWLEDGE_MESSAGES = 64
ACKNOWLEDGE_NBYTES = 2**20
"""After so many messages or bytes a receiver acknowledges them, so that the sender may drop its copies."""


class ReplayBuffer:
    """The counts of one end, and its own messages that were not acknowledged.

    Attributes:
        received: messages that came from the other end.
        acknowledged: messages of this end that the other is known to have.
        nbytes: size of the messages kept.

    Example:
        >>> buffer = ReplayBuffer()
        >>> for packet in (b"1", b"2", b"3"):
        ...     buffer.append(packet)
        >>> buffer.acknowledge(2)
        >>> buffer.unacknowledged
        (b'3',)
    """

    def __init__(self) -> None:
        self.received = self.acknowledged = self.nbytes = 0
        self._sent: deque[bytes] = deque()
        self._due_messages = self._due_nbytes = 0

    def append(self, packet: bytes) -> None:
        """Keeps a message that is sent."""
        self._sent.append(packet)
        self.nbytes += wire_nbytes(packet)

    def record(self, packet: bytes) -> bool:
        """Counts a message that came; returns whether it is time to acknowledge."""
        self.received += 1
        self._due_messages += 1
        self._due_nbytes += len(packet)
        if self._due_messages < ACKNOWLEDGE_MESSAGES and self._due_nbytes < ACKNOWLEDGE_NBYTES:
            return False
        self._due_messages = self._due_nbytes = 0
        return True

    def acknowledge(self, count: int) -> None:
        """Drops what the other end has: `count` messages since the session began.

        Raises:
            ProtocolError: fewer than it acknowledged before, or more than there were.
        """
        most = self.acknowledged + len(self._sent)
        if not self.acknowledged <= count <= most:
            raise ProtocolError(
                f"the other end acknowledges {count} messages; between {self.acknowledged} and {most} are possible"
            )
        while self.acknowledged < count:
            self.nbytes -= wire_nbytes(self._sent.popleft())
            self.acknowledged += 1

    @property
    def unacknowledged(self) -> tuple[bytes, ...]:
        """What the other end may not have, in order."""
        return tuple(self._sent)
