"""The messages: between a worker and a shard, from joining to leaving, and between equal ranks."""

from __future__ import annotations

from typing import Annotated, TypeAlias, get_args

import msgspec
from msgspec import Meta

from thinwire.schema.plan import MAX_TABLES, Config, Plan

MAX_STEPS = 1000
"""That somebody has checkpoints of."""

BatchSizes: TypeAlias = tuple[int, ...]
"""Which of a message's tables share its last frame, the batch: for every table how many float32 values of that frame
are its own, in order, or 0 where it has a frame of its own. Empty where no table is in a batch."""

Changes: TypeAlias = tuple[tuple[int, Config], ...]
"""Options of an optimizer that changed: the index of a parameter group, and its new values by name."""


class Join(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Worker → server, first; also of a worker that comes back. `Offer` is the answer.

    Args:
        rank: the worker's number, 0 … workers − 1.
        plan: what it plans with; the others' must be equal.
        steps: the exchanges of which it holds states; 0 is the beginning. Empty: it takes the shards' parameters.
        version: of the worker's thinwire; empty is not compared.
    """

    rank: int
    plan: Plan
    steps: Annotated[tuple[int, ...], Meta(max_length=MAX_STEPS)] = ()
    version: str = ""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker, after `Resume`: the worker takes part. `Values` of the tables that it lacks follow.

    Args:
        send_values: asks this worker (rank 0) for the initial values of every table.
        step: updates that every table has had.
        final: the version with which the training ends, where a worker has said so; else −1.
        elastic: whether the training continues without workers that die.
        memberships: who divides the data from which clock on, as pairs of a clock and ranks, where workers have come or
            gone; else empty.
        exchanges: where every push is an update by itself, of how many of this worker's exchanges each table has had
            its gradient; else nothing.
    """

    send_values: bool
    step: int = 0
    final: int = -1
    elastic: bool = False
    memberships: tuple[tuple[int, tuple[int, ...]], ...] = ()
    exchanges: tuple[int, ...] = ()


class Values(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Whole tables, uncompressed: initial weights up, and down to workers that start or are too far behind.

    `versions[i]` belongs to `tables[i]` and to frame i.
    """

    tables: tuple[int, ...]
    versions: tuple[int, ...]


class Ahead(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker, before `Values` of the same tables, where each end adds the optimizer's momentum itself.

    One frame for each table, uncompressed; two such messages are needed (`optimizers/outer_momentum.py`).

    Args:
        tables: which.
        anchor: the frames hold the parameters that the training began with; else how far those of the values' version
            are ahead of the values.
    """

    tables: tuple[int, ...]
    anchor: bool


class Push(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Worker → server: gradients of `tables` at `step`, one frame each; an empty frame says "no gradient this step".

    Args:
        rates: the learning rate of every parameter group at this step, so that any scheduler on the worker works.
        last: this worker ends the training with this step, unless another has ended it.
        digest: of this worker's replica before this step, where the workers compare theirs, after the instructions that
            its processor computes with and a colon; else empty.
        options: of the optimizer, where they differ from what this worker said last (at first: from the plan).
        batch: see `BatchSizes`.
    """

    step: int
    tables: tuple[int, ...]
    rates: tuple[float, ...] = ()
    last: bool = False
    digest: str = ""
    options: Changes = ()
    batch: BatchSizes = ()


class Delta(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker: what leads `tables` to `version`, one frame each; empty: unchanged.

    Args:
        version: that the tables have afterwards.
        tables: which.
        last: the training ends with this version.
        base: the version it leads from; −1 means the one before `version`.
        ranks: whose gradients are in it, where some may be missing; empty means everybody's. −1 alone: a worker's was
            NaN or Inf, and everybody skips.
        rates: the learning rates of this step, where the workers run the optimizer.
        options: of this step, likewise, where they differ from the plan's.
        batch: see `BatchSizes`.
    """

    version: int
    tables: tuple[int, ...]
    last: bool = False
    base: int = -1
    ranks: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    options: Changes = ()
    batch: BatchSizes = ()


class Scalars(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Both ways: one number for each table at `step`; down comes the largest over all workers (TernGrad §3.1)."""

    step: int
    values: tuple[float, ...]


class Leave(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Worker → server: done, in good order.

    Args:
        returning: not done: this worker joins all shards again, as one of them was lost.
        failure: not done: why this worker has failed, in words; empty where it has not.
    """

    returning: bool = False
    failure: str = ""


class Refused(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker: the conversation is over, and why.

    Args:
        reason: in words.
        lost: the server does not know the session that the worker wants to take up again: it may join anew.
        stopped: the server was stopped.
    """

    reason: str
    lost: bool = False
    stopped: bool = False


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


class Shard(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Between ranks: the frames of one shard of a bucket, to its owner (a gradient) or from it (the average).

    Args:
        step: of the training, from 0.
        bucket: its number in the step.
    """

    step: int
    bucket: int


class Skip(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Between ranks, in place of `Shard`: the sender holds NaN or Inf in this bucket, and nobody takes this step."""

    step: int
    bucket: int


class Contribution(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Learner → server: what inner steps changed of `tables`, one frame each; an empty frame says no change.

    Args:
        step: inner steps that the learner has taken.
        steps: of these, how many since its last contribution to these tables.
        examples: how many examples, or tokens, these steps took.
        bases: the version of each table that the learner continued from.
        tables: which.
        rates: the outer optimizer's learning rate of every parameter group.
        ended: the learner takes no further step before all learners have ended theirs.
        batch: see `BatchSizes`.
    """

    step: int
    steps: int
    examples: float
    bases: tuple[int, ...]
    tables: tuple[int, ...]
    rates: tuple[float, ...] = ()
    ended: bool = False
    batch: BatchSizes = ()


class Merged(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → learner: what leads `tables` from the version before to `version`, one frame each; empty: unchanged.

    Args:
        version: that the tables have afterwards.
        tables: which.
        ranks: whose contributions were merged.
        steps: for each of these, the inner steps that its newest merged contribution has.
        weights: of each in the mean; their sum is 1.
        examples: that are in the tables so far, of all learners.
        ended: every learner has ended its steps: this is the last version.
        batch: see `BatchSizes`.
    """

    version: int
    tables: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    examples: float = 0.0
    ended: bool = False
    batch: BatchSizes = ()


class Abort(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Between ranks, in place of any message: the sender has given up, and why."""

    reason: str


Message: TypeAlias = (
    Join
    | Welcome
    | Values
    | Push
    | Delta
    | Leave
    | Refused
    | Scalars
    | SessionOpen
    | SessionAccepted
    | Acknowledged
    | Shard
    | Skip
    | Abort
    | Members
    | Offer
    | Resume
    | Ahead
    | Contribution
    | Merged
)

KINDS: dict[int, type[Message]] = dict(zip([*range(1, 18), 22, 23, 24], get_args(Message), strict=True))
"""Messages by the number that travels, in the order of the union above. New ones come last; 18 to 21 stay unused."""
