"""The messages: between a worker and a shard, from joining to leaving, and between equal ranks."""

from __future__ import annotations

from typing import Annotated, TypeAlias, get_args

import msgspec
from msgspec import Meta

from thinwire.schema.plan import MAX_TABLES, Config, Plan

MAX_STEPS = 1000
"""The most checkpointed steps in one message."""

BatchSizes: TypeAlias = tuple[int, ...]
"""The tables that share a message's last frame, the batch: for every table its number of float32 values in that frame,
in order, or 0 for a table with a separate frame. Empty without a batch."""

Changes: TypeAlias = tuple[tuple[int, Config], ...]
"""Options of an optimizer that changed: the index of a parameter group, and its new values by name."""


class Join(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Worker → server, the first message, also of a worker that returns. `Offer` is the answer.

    Args:
        rank: the worker's number, 0 … workers − 1.
        plan: the worker's plan; all workers' plans must be equal.
        steps: the exchanges of which it holds states; 0 is the start. Empty: it takes the shards' parameters.
        version: of the worker's thinwire; an empty one is not compared.
    """

    rank: int
    plan: Plan
    steps: Annotated[tuple[int, ...], Meta(max_length=MAX_STEPS)] = ()
    version: str = ""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker, after `Resume`: the worker is a member. `Values` of the tables that it lacks follow.

    Args:
        send_values: this worker (rank 0) must send the initial values of every table.
        step: updates that every table has had.
        final: the version with which the training ends, if a worker has announced it; else −1.
        elastic: whether the training continues without workers that die.
        memberships: the ranks that divide the data, as pairs of a first clock and ranks, where workers have joined or
            left; else empty.
        exchanges: where every push is an update by itself, the number of this worker's gradients that each table has
            had; else empty.
    """

    send_values: bool
    step: int = 0
    final: int = -1
    elastic: bool = False
    memberships: tuple[tuple[int, tuple[int, ...]], ...] = ()
    exchanges: tuple[int, ...] = ()


class Values(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Whole tables, uncompressed: initial weights to the server, and values to workers that start or are far behind.

    `versions[i]` belongs to `tables[i]` and to frame i.
    """

    tables: tuple[int, ...]
    versions: tuple[int, ...]


class Ahead(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker, before `Values` of the same tables, where each end adds the optimizer's momentum.

    One frame for each table, uncompressed; the server sends two such messages (`optimizers/outer_momentum.py`).

    Args:
        tables: of the frames.
        anchor: True: the frames hold the training's first parameters; False: the momentum term at the values' version.
    """

    tables: tuple[int, ...]
    anchor: bool


class Push(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Worker → server: gradients of `tables` at `step`, one frame each; an empty frame means no gradient at this step.

    Args:
        rates: the learning rate of every parameter group at this step, so that any scheduler on the worker works.
        last: this worker ends the training with this step, unless another has ended it.
        digest: of this worker's replica before this step, where workers compare replicas, after the processor's
            instruction set and a colon; else empty.
        options: of the optimizer, where they differ from those that this worker sent last (at first: from the plan).
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
    """Server → worker: the change of `tables` to `version`, one frame each; an empty frame means unchanged.

    Args:
        version: of the tables after the change.
        tables: of the frames.
        last: the training ends with this version.
        base: the version before the change; −1 means the one before `version`.
        ranks: of the gradients in it, where some may be missing; empty means all workers'. −1 alone: a worker's
            gradient was NaN or Inf, and all workers skip the step.
        rates: the learning rates of this step, where the workers run the optimizer.
        options: of this step, where the workers run the optimizer and they differ from the plan's.
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
    """Both ways: one number for each table at `step`; the server sends the largest of all workers' (TernGrad §3.1)."""

    step: int
    values: tuple[float, ...]


class Leave(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Worker → server: this worker is done, or leaves for the reason given.

    Args:
        returning: this worker is not done and joins all shards again, because one of them was lost.
        failure: why this worker has failed, as text; empty where it has not.
    """

    returning: bool = False
    failure: str = ""


class Refused(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker: the conversation is over, for this reason.

    Args:
        reason: as text.
        lost: the server does not know the session that the worker resumes: the worker may join again.
        stopped: the server was stopped.
    """

    reason: str
    lost: bool = False
    stopped: bool = False


class SessionOpen(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Worker → server, the first message on every connection of a session that may outlive its connections.

    Args:
        session: a random name, the same on each of them.
        received: number of the server's messages that the worker has received in this session.
        acknowledged: number of the worker's messages that the server has acknowledged, which the worker cannot repeat.
        connection: number of connections of this session before this one.
    """

    session: str
    received: int = 0
    acknowledged: int = 0
    connection: int = 0


class SessionAccepted(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker: the answer to `SessionOpen`. Then both ends repeat the messages that the other has not received.

    Args:
        received: number of the worker's messages that the server has received in this session.
        grace_s: longest wait of the server for a worker whose connection broke, in seconds; 0: no wait.
    """

    received: int
    grace_s: float


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Both ways, at intervals: the number of messages received in this session, which the sender may drop."""

    count: int


class Members(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker: the members from now on, after one left or joined.

    Args:
        step: updates that every table has had.
        ranks: of the workers that are expected to push.
        least: the fewest workers with which updates are made.
        reason: the worker that joined or left, and why; empty where one left without error.
        interrupted: a worker lost its connection but is still a member: the other workers wait for it for a limited
            time.
        since: the clock from which on `ranks` divide the data, before any worker takes its examples; −1: no change.
    """

    step: int
    ranks: tuple[int, ...]
    least: int
    reason: str
    interrupted: bool = False
    since: int = -1


class Offer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker, the answer to `Join`: the steps from which this worker can continue. A later one replaces it.

    Args:
        begin: workers train at this shard, and expect this worker from this clock on; −1: all workers have joined, and
            continue together from one of `steps`.
        steps: steps of which the shard has a state.
        held: for each of these steps, the number of workers that have its state, too.
        newest: where the shards offer no common step, this shard may continue with its present parameters, at this step
            or a later one; −1: it may not.
    """

    begin: int = -1
    steps: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    newest: int = -1


class Resume(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Worker → server: the step from which this worker continues, the same at all shards; `Welcome` is the answer.

    Args:
        step: from which the worker continues.
        have: the worker's table versions at that step, or empty.
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
    """Between ranks, in place of `Shard`: the sender holds NaN or Inf in this bucket, and all ranks skip this step."""

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
        momentum: decay and gain of the momentum at each end, where some of the learners contributed; else empty.
        examples: that are in the tables so far, of all learners.
        ended: every learner has ended its steps: this is the last version.
        batch: see `BatchSizes`.
    """

    version: int
    tables: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    momentum: tuple[float, ...] = ()
    examples: float = 0.0
    ended: bool = False
    batch: BatchSizes = ()


class Abort(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Between ranks, in place of any message: the sender has failed, for this reason."""

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
