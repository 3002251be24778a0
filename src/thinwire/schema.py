"""The messages of both modes, and the plan that workers and servers agree on. Plain frozen values; no torch.

A message is a struct and, beside it, a tuple of frames: big bytes are never copied into the struct. It travels as an
array of its fields in this order. `KINDS` gives every message the number that travels; numbers are never reused.
Fields are added last, with a default, so that an older reader skips what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

BatchSizes: TypeAlias = tuple[int, ...]
"""Which of a message's tables share its last frame, the batch: for every table how many float32 values of that frame
are its own, in order, or 0 where it has a frame of its own. Empty where no table is in a batch."""

Reduce: TypeAlias = Literal["mean", "sum", "mean-of-senders", "clipped-mean-of-senders"]
"""How gradients are aggregated: their mean or sum; or, of tables whose codec sends some of the values, the mean over
those who sent a value (DeMo), with every worker's message scaled down to the median norm (SparseLoCo)."""

MAX_TABLES = 100_000
"""Of a plan."""
MAX_RANK = 32
"""Dimensions of a table: those of a frame."""
MAX_CODECS = 1000
"""Of a plan. Every one is tried out."""
MAX_GROUPS = 10_000
"""Of a plan's parameters."""
MAX_STEPS = 1000
"""That somebody has checkpoints of."""
MAX_NOTE_NBYTES = 64
"""Of what a worker tells the others with a push."""

Config: TypeAlias = Annotated[
    dict[str, str | int | float | bool | Annotated[list[int | float], Meta(max_length=64)] | None],
    Meta(max_length=64),
]
"""Options of a codec or an optimizer, by name. They are bounded: an empty dict is one byte on the wire, and 64 here."""

Changes: TypeAlias = tuple[tuple[int, Config], ...]
"""Options of an optimizer that changed: the index of a parameter group, and its new values by name."""

Settings: TypeAlias = Mapping[str, str | int | float | bool]
"""What else must be equal on all workers, by name."""


class TableSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the model.

    Args:
        name: the parameter's (or buffer's) name in the model.
        shape: its shape.
        up: index into `Plan.codecs` for pushes of its gradient.
        down: index into `Plan.codecs` for pulls of its model delta.
        group: index into `Plan.groups`: whose optimizer options apply.
        state: True for a buffer (a batch-norm statistic): one worker's values, relayed as they are.
    """

    name: str
    shape: Annotated[tuple[int, ...], Meta(max_length=MAX_RANK)]
    up: int = 0
    down: int = 0
    group: int = 0
    state: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What all workers and the server must agree on; the first worker to join brings it, the rest are compared.

    Args:
        workers: how many workers push.
        tables: the model's tensors, in the model's order; a table is known by its index.
        codecs: codec configurations (`codec.config()`).
        optimizer: name of a torch optimizer on the server's allow-list.
        groups: options of each parameter group, JSON values.
        reduce: how gradients are aggregated, see `Reduce`.
        state_interval: buffers travel after every so many steps.
        consistency: name of the consistency policy, options spelled out.
        downlink: what the server sends down: `delta`, the change of a model that it updates; `gradient`, the
            average gradient, for workers that run the optimizer; `weights`, the average of the workers' weights.
        local: what workers that push updates of their own optimizer agree on besides; empty where they push gradients.
        settings: see `Settings`: seed, batch, steps, a digest of the data.
    """

    workers: int
    tables: Annotated[tuple[TableSpec, ...], Meta(max_length=MAX_TABLES)]
    codecs: Annotated[tuple[Config, ...], Meta(max_length=MAX_CODECS)]
    optimizer: str
    groups: Annotated[tuple[Config, ...], Meta(max_length=MAX_GROUPS)]
    reduce: Reduce = "mean"
    state_interval: int = 50
    consistency: str = "bsp"
    downlink: Literal["delta", "gradient", "weights"] = "delta"
    local: str = ""
    settings: dict[str, str | int | float | bool] = {}


class Join(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Worker → server, first.

    Args:
        rank: the worker's number, 0 … workers − 1.
        plan: what it plans with; the others' must be equal.
        have: the table versions of a worker that resumes, else nothing.
        version: of the worker's thinwire; empty is not compared.
        steps: that the worker can go on from, where it lost a shard or resumes: it then waits for an `Offer`, in
            place of a `Welcome`; empty: from any, with the shards' parameters alone. None: it begins.
    """

    rank: int
    plan: Plan
    have: Annotated[tuple[int, ...], Meta(max_length=MAX_TABLES)] = ()
    version: str = ""
    steps: Annotated[tuple[int, ...], Meta(max_length=MAX_STEPS)] | None = None


class Welcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker. `send_values` asks this worker (rank 0) for the initial values of every table.

    Args:
        send_values: whether it does.
        step: updates that every table has had.
        final: the version with which the training ends, where worker 0 has said so; else −1.
        begin: the first clock that this worker is expected at, where it joins a training that went on without it;
            else −1.
        elastic: whether the training goes on without workers that die.
        memberships: who divides the data from which clock on, as pairs of a clock and ranks, where workers have come or
            gone; else empty.
        exchanges: where every push is an update by itself, of how many of this worker's exchanges each table has had
            its gradient; else nothing.
        skips_late: whether updates are made without workers that are late. Such a one is told by another `Welcome`,
            with `begin`, at which clock it is expected again.
    """

    send_values: bool
    step: int = 0
    final: int = -1
    begin: int = -1
    elastic: bool = False
    memberships: tuple[tuple[int, tuple[int, ...]], ...] = ()
    exchanges: tuple[int, ...] = ()
    skips_late: bool = False


class Values(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Whole tables, uncompressed: initial weights up, and down to workers that start or are too far behind.

    `versions[i]` belongs to `tables[i]` and to frame i.
    """

    tables: tuple[int, ...]
    versions: tuple[int, ...]


class Push(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Worker → server: gradients of `tables` at `step`, one frame each; an empty frame says "no gradient this step".

    Args:
        rates: the learning rate of every parameter group at this step, so that any scheduler on the worker works.
        last: rank 0 ends the training with this step.
        digest: of this worker's replica before this step, where the workers compare theirs; else empty.
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
        returning: not done: this worker has lost another shard, and joins again to go back with all the others.
    """

    returning: bool = False


class Refused(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker: the conversation is over, and why.

    Args:
        reason: in words.
        lost: the server does not know the session that the worker wants to take up again, or all go back: it may join
            anew.
        step: that the others are at, who do not go back with this worker; else −1.
    """

    reason: str
    lost: bool = False
    step: int = -1


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


class Abort(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Between ranks, in place of any message: the sender has given up, and why."""

    reason: str


class Members(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Server → worker: who takes part from now on, after somebody went away or came.

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
    """Server → worker, once every worker has said which steps it can go on from.

    Args:
        steps: those of them that the shard has.
        newest: where no step is offered by all shards, this one may go on with the parameters that it has, at this step
            or any later one; −1: it may not.
    """

    steps: tuple[int, ...]
    newest: int = -1


class Resume(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Worker → server: the newest step that all shards offer. The shard goes there once every worker says so.

    Args:
        step: which.
        have: the table versions that the worker has of it, or nothing.
    """

    step: int
    have: tuple[int, ...] = ()


class Saved(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Both ways, between those who write checkpoints: which steps they can go back to, so that nobody removes one that
    others still need.

    Args:
        steps: a worker's own; from a shard, those of its own that all its workers have. None: the worker takes any.
        safe: the newest step that everybody has, as far as the worker knows from all shards; −1 while it does not.
    """

    steps: Annotated[tuple[int, ...], Meta(max_length=MAX_STEPS)] | None
    safe: int = -1


class TunedPush(Push, frozen=True, kw_only=True, array_like=True):
    """A worker's first push of an exchange to a shard, where workers choose the codec anew for each.

    Args:
        replaced: index into `Plan.codecs`: tables whose pulls were planned with it have another codec.
        codec: index of that, which these tables have both ways in this exchange. Of several workers' the lowest rank's
            counts for the pulls; frames of pushes name theirs themselves.
        sparsity: the largest multiplier s of the pulls, in [1, 2).
        note: for all workers, which the shard does not look into; or nothing.
    """

    replaced: int = 0
    codec: int = 0
    sparsity: float = 1.0
    note: Annotated[bytes, Meta(max_length=MAX_NOTE_NBYTES)] = b""


class TunedDelta(Delta, frozen=True, kw_only=True, array_like=True):
    """The first delta of a version, where workers sent notes with their pushes.

    Args:
        notes: pairs of a rank and its note, by rank.
    """

    notes: tuple[tuple[int, bytes], ...] = ()


class Echo(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Worker → server, which sends it back with its frames, so that the worker knows how long bytes take.

    Args:
        number: of the worker's echoes, from 1.
    """

    number: int


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
    | Saved
    | TunedPush
    | TunedDelta
    | Echo
)

KINDS: dict[int, type[Message]] = dict(enumerate(get_args(Message), start=1))
"""Messages by the number that travels: a message's place in the union above, from 1. New ones come last."""
