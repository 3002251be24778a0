"""A packet as gRPC messages: chunks of equal size, and a shorter message that ends it.

gRPC reads a whole message before it delivers it. Its limit is therefore one chunk's size, and a receiver decides after
every chunk whether to accept more of the packet. Nearly all packets are small and fit one message.
"""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.transports.base import CHUNK_NBYTES


def split(packet: bytes) -> Iterator[bytes]:
    """Yields the messages that make up a packet; the last is shorter than a chunk, and may be empty.

    >>> [len(message) for message in split(bytes(2 * CHUNK_NBYTES + 5))]
    [1048576, 1048576, 5]
    """
    if len(packet) < CHUNK_NBYTES:
        yield packet
        return
    view = memoryview(packet)
    for at in range(0, len(packet) + 1, CHUNK_NBYTES):
        yield bytes(view[at : at + CHUNK_NBYTES])


class Assembly:
    """Puts packets together again.

    Attributes:
        nbytes: received so far of the present packet; 0 between packets.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._chunks: list[bytes] = []

    def add(self, message: bytes) -> bytes | None:
        """Takes the next message; returns the packet that it ends, or None before the last message."""
        self.nbytes += len(message)
        if len(message) == CHUNK_NBYTES:
            self._chunks.append(message)
            return None
        self.nbytes = 0
        if not self._chunks:
            return message
        chunks, self._chunks = self._chunks, []
        return b"".join((*chunks, message))

    def drop(self) -> None:
        """Drops the received part of a packet."""
        self.nbytes, self._chunks = 0, []
