"""Moves messages between equal ranks: bytes in, bytes out, by rank and tag, without interpreting them.

Messages of one tag from one rank arrive in the order of sending, independently of other tags. A receive is posted with
a buffer that is long enough for the longest message, so no sizes are exchanged: the message contains its length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import numpy as np


class Work(Protocol):
    """A pending send or receive."""

    def wait(self, timeout: timedelta) -> object:
        """Waits until it is done. Raises RuntimeError on failure or timeout."""
        ...


class ReceiveBuffer:
    """Memory for messages of at most `nbytes` bytes; untouched pages take no memory, so the largest size is free."""

    __slots__ = ("array", "data")

    def __init__(self, nbytes: int) -> None:
        self.array = np.empty(nbytes, np.uint8)
        self.data: memoryview = self.array.data


@dataclass(frozen=True, slots=True)
class Transfer:
    """A pending message from or to a peer, and the memory that must live until it is done."""

    peer: int
    work: Work
    data: memoryview


class PeerGroup(ABC):
    """One rank's connections to all other ranks.

    Attributes:
        rank: this rank, 0 … size − 1.
        size: number of ranks.
        timeout: longest wait for a peer.
    """

    rank: int
    size: int
    timeout: timedelta

    @property
    def names(self) -> Sequence[int]:
        """The names of the ranks in messages: their global ranks."""
        return range(self.size)

    @property
    def peers(self) -> list[int]:
        """The other ranks, in order."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @abstractmethod
    def receive(self, peer: int, buffer: ReceiveBuffer, tag: int) -> Transfer:
        """Posts a receive into `buffer`, which may be longer than the message. Raises TransportError."""

    @abstractmethod
    def send(self, peer: int, data: bytearray, tag: int) -> Transfer:
        """Starts a send. Raises TransportError."""

    @abstractmethod
    def wait(self, transfer: Transfer, timeout: timedelta | None = None) -> memoryview:
        """Waits for a transfer, for at most `timeout` (by default the group's), and returns its memory.

        Raises:
            DeadlineError: it took too long.
            TransportError: the peer is gone.
        """
