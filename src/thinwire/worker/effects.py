"""What a worker asks its surroundings to do. Plain values, for others to carry out.

A method of a worker that talks to shards is a **procedure**: a generator that yields effects and returns when the
worker can go on. Whoever runs it (`runtime/driver.py`, a simulator, a test) carries out each effect before it asks for
the next.
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
    """Wait for the next message of a shard and pass it to `Conversation.received`.

    Args:
        shard: whose message.
        awaited: what the worker waits for, for messages to people.
    """

    shard: int
    awaited: str


@dataclass(frozen=True, slots=True)
class Poll:
    """Pass every message of a shard that has arrived to `Conversation.received`, without waiting."""

    shard: int


Effect: TypeAlias = Send | Receive | Poll
Procedure: TypeAlias = Generator[Effect, None, T]
