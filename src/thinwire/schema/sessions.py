"""Between a worker and a shard: connections that come and go, members, and the step from which all continue."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from thinwire.schema.plan import MAX_TABLES

MAX_STEPS = 1000
"""That somebody has checkpoints of."""


class SessionOpen(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Worker → server, before anything else on every connection of a session that may outlive its connections.

    Args:
        session: a random name, the same on each of them.
        received: messages of the server that the worker has received in this session.
        acknowledged: messages of its own that the server has acknowledged, which the worker cannot repeat.
        connection: how many connections of this session were opened before this one.
    """

    session: str
    received: int = 0
    acknowledged: int = 0
    connection: int = 0


class SessionAccepted(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker: the answer to `SessionOpen`. What the other end has not received follows, on both sides.

    Args:
        received: messages of the worker that the server has received in this session.
        grace_s: how long the server waits for a worker whose connection broke, in seconds; 0: not at all.
    """

    received: int
    grace_s: float


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Both ways, now and then: so many messages have been received in this session and need not be kept."""

    count: int


class Members(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker: the members from now on, after one went away or came.

    Args:
        step: updates that every table has had.
        ranks: of the workers that are expected to push.
        least: with fewer workers no update is made until others come.
        reason: who came or went, and why; empty where one has left in good order.
        interrupted: nobody has gone yet: a worker lost its connection, and the others wait for it for a while.
        since: the clock from which on `ranks` divide the data, which no worker has taken examples for; −1: as before.
    """

    step: int
    ranks: tuple[int, ...]
    least: int
    reason: str
    interrupted: bool = False
    since: int = -1


class Offer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker, the answer to `Join`: from where this worker can continue. A later one replaces it.

    Args:
        begin: workers train here, and this one is expected from this clock on; −1: all of them have joined, and
            continue together from one of `steps`.
        steps: of which the shard has a state.
        held: how many of its workers have one of each of these steps, too.
        newest: where no step is offered by all shards, this one may continue with the parameters that it has, at this
            step or any later one; −1: it may not.
    """

    begin: int = -1
    steps: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    newest: int = -1


class Resume(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Worker → server: the step from which this worker continues, the same at all shards; `Welcome` is the answer.

    Args:
        step: which.
        have: the table versions that the worker has of it, or nothing.
    """

    step: int
    have: Annotated[tuple[int, ...], Meta(max_length=MAX_TABLES)] = ()
