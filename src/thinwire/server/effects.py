"""The effects that a shard returns: plain values, for the runtime to carry out."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.packets import EncodedTensor
from thinwire.quantities import plain_text
from thinwire.schema import Message, Refused


@dataclass(frozen=True, slots=True)
class Send:
    """Send one message to some peers."""

    peers: tuple[int, ...]
    message: Message
    frames: tuple[EncodedTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Close:
    """End a peer's session, after a last message.

    Args:
        peer: whose.
        message: its reason is logged.
        told: people know the reason already, or need not.
    """

    peer: int
    message: Refused | None = None
    told: bool = False


@dataclass(frozen=True, slots=True)
class Tell:
    """Log a message for the operator of the server."""

    text: str


Effect = Send | Close | Tell


def refused(reason: str) -> Refused:
    """Returns the last message to a peer; its reason may quote what another peer has sent."""
    return Refused(reason=plain_text(reason))
