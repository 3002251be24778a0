"""One rank's part in the exchange: groups buckets into exchanges, and skips steps with all ranks. Sans-IO.

`bucket_ready` gathers buckets and returns exchanges, which the caller runs (see `exchange`) and reports as `finished`,
in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from thinwire.codecs import Codec, Context
from thinwire.codecs.decoding import Values
from thinwire.collective.exchange import Exchange, Group
from thinwire.collective.residuals import Residuals
from thinwire.collective.shard import Shard, Span, Spans
from thinwire.collective.tally import Tally
from thinwire.errors import NonFiniteError
from thinwire.policies.assignment import Partition

_KEPT_GROUPS = 256
"""The most groups that are kept: DDP rebuilds its buckets once or twice, and further groups are of former models."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """The bucket of every step: its tensors, and the offset of each in its flat values.

    Args:
        offsets: by tensor name.
        nbytes: of the gradients.
        stride: number of values of a piece, where the bucket holds one piece for each rank, in the order of ranks, as
            in a reduce-scatter; offsets then count from the piece's start. 0 where every tensor lies in one piece.
    """

    offsets: tuple[tuple[str, int], ...]
    nbytes: int
    stride: int = 0

    def begin(self, offset: int, part: Partition) -> int:
        """Returns the start, in the flat values, of a slice of the tensor at `offset`."""
        return offset + (part.server * self.stride if self.stride else part.start)


class Collective:
    """The state of one rank between steps.

    Args:
        residuals: this rank's contexts, unused by other code between a step's first bucket and its end.
        skip: whether NaN or Inf on any rank makes all ranks skip the step; otherwise it is an error.
        drop_zeros: whether a slice without a gradient is left out, as DDP leaves out unused parameters.
        group_nbytes: buckets share an exchange until their gradients have so many bytes.
        pulls: whether every rank gets the averages of all shards; otherwise only its own, as in a reduce-scatter.
        names: of the ranks in messages, as in `PeerGroup.names`; by default their numbers here.
        clip: whether means over senders scale each rank's message down to the median norm.

    Attributes:
        steps_skipped: number of steps that all ranks skipped because a rank's gradient held NaN or Inf.
        tally: of the next exchanges; None: they are not measured.
    """

    def __init__(
        self,
        residuals: Residuals,
        *,
        skip: bool,
        drop_zeros: bool,
        group_nbytes: int,
        pulls: bool = True,
        names: Sequence[int] | None = None,
        clip: bool = False,
    ) -> None:
        self.residuals = residuals
        self.skip = skip
        self.drop_zeros = drop_zeros
        self.group_nbytes = group_nbytes
        self.pulls = pulls
        self._clip = clip
        self.steps_skipped = 0
        self.tally: Tally | None = None
        self._gathered: list[Bucket] = []
        self._groups: dict[tuple[Bucket, ...], Group] = {}
        self._skipped = False
        self._names = names or range(residuals.world)

    def bucket_ready(self, bucket: Bucket, step: int, index: int, *, last: bool) -> list[tuple[Exchange, int]]:
        """Takes a bucket whose gradients are ready.

        Args:
            bucket: the same object at every step.
            step: of the training.
            index: the bucket's number in the step; 0 begins a step, and drops the buckets of an aborted one.
            last: whether it ends the step.

        Returns:
            The exchanges to run now, the oldest first, each with its number of buckets.
        """
        if index == 0:
            self._gathered.clear()
        ready = []
        if self._gathered and self._kind(self._gathered[0]) != self._kind(bucket):
            ready.append(self._exchange(step, index, last=False))
        self._gathered.append(bucket)
        if last or sum(each.nbytes for each in self._gathered) >= self.group_nbytes:
            ready.append(self._exchange(step, index + 1, last=last))
        return ready

    def started(self, exchange: Exchange) -> None:
        """Notes the start of an exchange; before the first of a step that may be skipped, copies residuals."""
        if exchange.bucket == 0 and self.skip:
            self.residuals.snapshot()

    def finished(self, exchange: Exchange) -> None:
        """Notes the end of an exchange; after the last of a skipped step, restores residuals."""
        self._ended(exchange.bucket, exchange.skipped, exchange.last)

    def _ended(self, bucket: int, skipped: bool, last: bool) -> None:
        if bucket == 0:
            self._skipped = False  # of an aborted step
        self._skipped = self._skipped or skipped
        if last and self._skipped:
            self.residuals.restore()
            self.steps_skipped += 1
            self._skipped = False

    def complete_alone(self, bucket: Bucket, values: Values, index: int, *, last: bool) -> bool:
        """Takes a bucket of the only rank: adds the unsent values of an earlier run with more ranks.

        Args:
            bucket: of the values.
            values: the gradient, flat; changed in place.
            index: the bucket's number in the step; 0 begins a step.
            last: whether it ends the step.

        Returns:
            Whether the gradient is finite. If not, the values are undefined and the step is skipped: after its last
            bucket, residuals have their values from before the step.

        Raises:
            NonFiniteError: NaN or Inf, where steps are not skipped; nothing has been added.
        """
        if index == 0 and self.skip:
            self.residuals.snapshot()
        whole = torch.as_tensor(values, device=values.device)
        sizes = ((name, at, self.residuals.tensors[name].numel) for name, at in bucket.offsets)
        found = next((name for name, at, size in sizes if not whole[at : at + size].isfinite().all()), None)
        if found is None:
            self.flush(bucket, values, self.residuals.names())
        elif not self.skip:
            raise NonFiniteError(f"{found}: holds NaN or Inf; nothing was added to it")
        self._ended(index, found is not None, last)
        return found is None

    def skip_step(self, *, exchanged: bool) -> None:
        """Skips the step that has just been exchanged, because ranks in other groups skip it.

        Args:
            exchanged: whether this rank had an exchange; otherwise its state is unchanged since the previous step.
        """
        if exchanged:
            self.residuals.restore()
        self.steps_skipped += 1

    def recode(self, contexts: Iterable[Context], codec: Codec) -> None:
        """Sets another codec for contexts, between two steps; it also sends their residuals.

        Args:
            contexts: of `residuals`, each with a residual.
            codec: keeps a residual.
        """
        for context in contexts:
            context.codec = codec
        for group in self._groups.values():
            for shard in group.shards:
                shard.recode()

    def awaits(self, bucket: Bucket, waiting: Collection[str]) -> bool:
        """Whether any of these contexts, given by name, belongs to a bucket."""
        shards = self.group([bucket]).shards
        return any(context.name in waiting for shard in shards for context in shard.contexts)

    def flush(self, bucket: Bucket, values: Values, waiting: set[str]) -> None:
        """Adds residuals to a bucket's gradient, for a step that all ranks all-reduce uncompressed.

        The average over the ranks then holds all residuals in full: the residual of an average is therefore multiplied
        by the number of ranks before it is added to its owner's gradient.

        Args:
            bucket: to be averaged next.
            values: this rank's gradient, flat, in units of a gradient; changed in place.
            waiting: as for `Shard.flush`.
        """
        residuals = self.residuals
        for owner, shard in enumerate(self.group([bucket]).shards):
            owned = owner == residuals.rank and residuals.mean
            shard.flush([values], waiting, times=residuals.world if owned else 1)

    def group(self, buckets: Sequence[Bucket]) -> Group:
        """Returns the shards of buckets that share an exchange; made for the first one."""
        key = tuple(buckets)
        found = self._groups.get(key)
        if found is None:
            if len(self._groups) >= _KEPT_GROUPS:
                self._groups.clear()
            found = self._groups[key] = self._shards(key)
        return found

    def _exchange(self, step: int, end: int, *, last: bool) -> tuple[Exchange, int]:
        count, group = len(self._gathered), self.group(self._gathered)
        self._gathered.clear()
        return Exchange(group, step, end - count, last=last, tally=self.tally), count

    def _kind(self, bucket: Bucket) -> object:
        """Returns the common property of a group's buckets, whose uncompressed values share a frame."""
        tensor = self.residuals.tensors[bucket.offsets[0][0]]
        return tensor.compute_dtype, tensor.device

    def _shards(self, buckets: Sequence[Bucket]) -> Group:
        residuals = self.residuals
        own = dict[int, Context]()
        contexts: list[list[Context]] = [[] for _ in range(residuals.world)]
        coded: list[list[Span]] = [[] for _ in range(residuals.world)]
        plain: list[list[Span]] = [[] for _ in range(residuals.world)]
        for place, bucket in enumerate(buckets):
            for name, offset in bucket.offsets:
                for part in residuals.partitions[name]:
                    begin = bucket.begin(offset, part)
                    context = residuals.contexts.get((name, part))
                    (plain if context is None else coded)[part.server].append(
                        Span(name, place, begin, begin + part.numel)
                    )
                    if part.server == residuals.rank and (pushed := residuals.pushes(name).get(part)) is not None:
                        own[len(contexts[part.server])] = pushed
                    if context is not None:
                        contexts[part.server].append(context)
        wide = residuals.tensors[buckets[0].offsets[0][0]].compute_dtype.itemsize == 8
        return Group(
            tuple(
                Shard(
                    contexts[owner],
                    coded=Spans(coded[owner]),
                    plain=Spans(plain[owner]),
                    dtype=np.dtype(np.float64 if wide else np.float32),
                    drop_zeros=self.drop_zeros,
                    own=own if owner == residuals.rank else {},
                )
                for owner in range(residuals.world)
            ),
            residuals.rank,
            self._names,
            mean=residuals.mean,
            clip=self._clip,
            skip=self.skip,
            pulls=self.pulls,
        )
