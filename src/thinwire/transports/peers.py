"""What moves messages between equal ranks: bytes in, bytes out, by rank and tag. It knows nothing of their meaning.

Messages of one tag from one rank arrive in the order in which they were sent, whatever other tags do. A receive is
posted with a buffer that is long enough for the longest message, so no sizes are exchanged: the message says how long
it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import numpy as np


class Work(Protocol):
    """A send or a receive under way."""

    def wait(self, timeout: timedelta) -> object:
        """Waits until it is done. Raises RuntimeError where it failed or took too long."""
        ...


class ReceiveBuffer:
    """Memory for messages of at most `nbytes` bytes; untouched pages take no memory, so room for the worst is free."""

    __slots__ = ("array", "data")

    def __init__(self, nbytes: int) -> None:
        self.array = np.empty(nbytes, np.uint8)
        self.data: memoryview = self.array.data


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message on its way from or to a peer, and the memory that must live until it is over."""

    peer: int
    work: Work
    data: memoryview


class PeerGroup(ABC):
    """One rank's way to all others.

    Attributes:
        rank: this rank, 0 … size − 1.
        size: number of ranks.
        timeout: how long a peer may keep this rank waiting.
    """

    rank: int
    size: int
    timeout: timedelta

    @property
    def names(self) -> Sequence[int]:
        """What people call each of them: its rank in the whole program."""
        return range(self.size)

    @property
    def peers(self) -> list[int]:
        """The other ranks, in order."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @abstractmethod
    def receive(self, peer: int, buffer: ReceiveBuffer, tag: int) -> Transfer:
        """Posts a receive into `buffer`, which may be longer than what comes. Raises TransportError."""

    @abstractmethod
    def send(self, peer: int, data: bytearray, tag: int) -> Transfer:
        """Starts to send. Raises TransportError."""

    @abstractmethod
    def wait(self, transfer: Transfer, timeout: timedelta | None = None) -> memoryview:
        """Waits for a transfer, for at most `timeout` (by default the group's), and returns its memory.

        Raises:
            DeadlineError: it took too long.
            TransportError: the peer is gone.
        """
