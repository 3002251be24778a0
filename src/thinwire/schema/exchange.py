"""What an exchange is made of: between a worker and a shard, from joining to leaving, and between equal ranks."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from thinwire.schema.plan import MAX_TABLES, Config, Plan
from thinwire.schema.sessions import MAX_STEPS

BatchSizes: TypeAlias = tuple[int, ...]
"""Which of a message's tables share its last frame, the batch: for every table how many float32 values of that frame
are its own, in order, or 0 where it has a frame of its own. Empty where no table is in a batch."""

Changes: TypeAlias = tuple[tuple[int, Config], ...]
"""Options of an optimizer that changed: the index of a parameter group, and its new values by name."""


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
        final: the version with which the training ends, where a worker has said so; else −1.
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
        failure: not done: why this worker has failed, in words; empty where it has not.
    """

    returning: bool = False
    failure: str = ""


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
