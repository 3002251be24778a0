"""The effects of a worker's procedures, and the type of a procedure.

A method that talks to a shard is a **procedure**: a generator that yields effects and returns when the worker can go
on. Its caller (`runtime/driver.py`, a simulator, a test) carries out each effect before it asks for the next.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from thinwire.packets import EncodedTensor
from thinwire.schema import Message

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Send:
    """Send one message, with its frames, to a shard."""

    shard: int
    message: Message
    frames: tuple[EncodedTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the next message of a shard, for what `awaited` says, and pass it to `Conversation.received`."""

    shard: int
    awaited: str


@dataclass(frozen=True, slots=True)
class Poll:
    """Pass every message of a shard that has arrived to `Conversation.received`, without waiting."""

    shard: int


Effect: TypeAlias = Send | Receive | Poll
Procedure: TypeAlias = Generator[Effect, None, T]
