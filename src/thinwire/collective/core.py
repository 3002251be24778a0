"""One rank's part in the exchange: which buckets travel together, and which steps all ranks skip. Sans-IO.

`bucket_ready` gathers buckets and returns exchanges, which the caller carries out (see `exchange`) and reports as
`finished`, in the same order.
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
"""DDP rebuilds its buckets once or twice; more than this many groups are of models that never come back."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """A bucket as it comes back step after step: its tensors, and where each begins in its flat values.

    Args:
        offsets: by tensor name.
        nbytes: of the gradients.
        stride: where the bucket holds what each rank owns in one piece, rank after rank, as a reduce-scatter has it:
            the values of a piece; offsets are then from its begin. 0 where every tensor lies in one piece.
    """

    offsets: tuple[tuple[str, int], ...]
    nbytes: int
    stride: int = 0

    def begin(self, offset: int, part: Partition) -> int:
        """Returns where a slice of the tensor at `offset` begins in the flat values."""
        return offset + (part.server * self.stride if self.stride else part.start)


class Collective:
    """The state of one rank between steps.

    Args:
        residuals: this rank's contexts, touched by no one else between a step's first bucket and its end.
        skip: whether NaN or Inf on any rank makes all ranks skip the step; otherwise it is an error.
        drop_zeros: whether a slice without any gradient is left out, as DDP leaves out unused parameters.
        group_nbytes: buckets travel together until their gradients have so many bytes.
        pulls: whether every rank gets the averages of all shards; otherwise of its own alone, as in a reduce-scatter.
        names: what people call the ranks, as in `PeerGroup.names`; by default their numbers here.
        clip: whether means over senders scale each rank's message down to the median norm.

    Attributes:
        steps_skipped: steps that no rank took because some rank's gradient held NaN or Inf.
        tally: of the exchanges to come; None where they are not measured.
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
            bucket: the same object whenever the same bucket comes.
            step: of the training.
            index: the bucket's number in the step; 0 begins a step, and forgets the buckets of one that was broken off.
            last: whether it ends the step.

        Returns:
            What is now to be exchanged, and how many buckets each exchange holds: the oldest first.
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
        """Says that an exchange begins: before the first of a step, residuals are copied where it may be skipped."""
        if exchange.bucket == 0 and self.skip:
            self.residuals.snapshot()

    def finished(self, exchange: Exchange) -> None:
        """Says that an exchange is complete: after the last of a step that is skipped, residuals are restored."""
        self._ended(exchange.bucket, exchange.skipped, exchange.last)

    def _ended(self, bucket: int, skipped: bool, last: bool) -> None:
        if bucket == 0:
            self._skipped = False  # of a step that was broken off
        self._skipped = self._skipped or skipped
        if last and self._skipped:
            self.residuals.restore()
            self.steps_skipped += 1
            self._skipped = False

    def complete_alone(self, bucket: Bucket, values: Values, index: int, *, last: bool) -> bool:
        """Takes a bucket where this rank is the only one: adds what an earlier run with more ranks left unsent.

        Args:
            bucket: what the values are of.
            values: the gradient, flat; changed in place.
            index: the bucket's number in the step; 0 begins a step.
            last: whether it ends the step.

        Returns:
            Whether the gradient is finite. Else the values mean nothing, and the step is skipped: after its last bucket
            residuals are what they were before it.

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
        """Skips the step that has just been exchanged after all, as ranks do that this rank had no exchange with.

        Args:
            exchanged: whether this rank had an exchange: else nothing has changed since the step before.
        """
        if exchanged:
            self.residuals.restore()
        self.steps_skipped += 1

    def recode(self, contexts: Iterable[Context], codec: Codec) -> None:
        """Gives contexts another codec, between two steps; what waits in their residuals is sent with it.

        Args:
            contexts: some of the residuals', all with a residual.
            codec: one that keeps a residual.
        """
        for context in contexts:
            context.codec = codec
        for group in self._groups.values():
            for shard in group.shards:
                shard.recode()

    def awaits(self, bucket: Bucket, waiting: Collection[str]) -> bool:
        """Whether some of these contexts, given by name, are of a bucket."""
        shards = self.group([bucket]).shards
        return any(context.name in waiting for shard in shards for context in shard.contexts)

    def flush(self, bucket: Bucket, values: Values, waiting: set[str]) -> None:
        """Adds to a bucket's gradient what waits in residuals, for a step that all ranks all-reduce uncompressed.

        The average over the ranks then holds all of it: what waits of an average counts once in it, and so times the
        number of ranks in its owner's gradient.

        Args:
            bucket: what is about to be averaged.
            values: this rank's gradient, flat, in units of a gradient; changed in place.
            waiting: as for `Shard.flush`.
        """
        residuals = self.residuals
        for owner, shard in enumerate(self.group([bucket]).shards):
            owned = owner == residuals.rank and residuals.mean
            shard.flush([values], waiting, times=residuals.world if owned else 1)

    def group(self, buckets: Sequence[Bucket]) -> Group:
        """Returns the shards of buckets that travel together; made when they first do."""
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
        """What buckets of one group have in common, since their uncompressed values share a frame."""
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
