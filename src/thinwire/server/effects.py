"""What a shard wants done: plain values, for others to carry out."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.packets import EncodedTensor
from thinwire.schema import Message, Refused

MAX_REASON = 2000
"""Characters. A reason may quote what a peer sent, and the answer to a large message must not be larger still."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send one message to some peers."""

    peers: tuple[int, ...]
    message: Message
    frames: tuple[EncodedTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Close:
    """End a peer's session, after a last message."""

    peer: int
    message: Message | None = None


Effect = Send | Close


def refused(reason: str) -> Refused:
    """Returns the last message to a peer, no longer than it needs to be.

    >>> len(refused("x" * 9000).reason)
    2002
    """
    return Refused(reason=reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} …")
