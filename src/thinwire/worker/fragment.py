"""Tensors that a worker exchanges together: their changes by local steps, updates, and the merge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from thinwire.codecs.flats import Flats
from thinwire.codecs.tensor_set import TensorSet
from thinwire.packets import EncodedTensor
from thinwire.worker.apply_buffer import Update
from thinwire.worker.costs import count_pulls, count_pushes
from thinwire.worker.finite import all_finite
from thinwire.worker.model import WorkerTensor
from thinwire.worker.table import WorkerTable, prepare_all

Frames = Iterator[tuple[WorkerTable, EncodedTensor]]

Pulled = Sequence[tuple[WorkerTable, Sequence[Update]]]
"""Every table with the updates that `Conversation.pull` returned."""


class Fragment:
    """Some tensors of a model at one worker, and their tables.

    Args:
        tensors: in the model's order.
        now: returns a time in seconds.

    Attributes:
        by_shard: the tables, by the shard that holds them.
    """

    def __init__(self, tensors: Sequence[WorkerTensor], now: Callable[[], float]) -> None:
        self.tensors, self._now = tensors, now
        self._shared = [tensor.values for tensor in tensors]
        self._tables = [table for tensor in tensors for table in tensor.tables]
        self._values = Flats.of([table.values for table in self._tables])
        self.by_shard: dict[int, list[WorkerTable]] = {}
        for table in self._tables:
            self.by_shard.setdefault(table.shard, []).append(table)
        self._set = TensorSet(
            [table.context for table in self._tables if table.context is not None],
            [place for place, table in enumerate(self._tables) if table.travels_in_batch],
        )

    # ---- up

    def find_changes(self) -> list[bool]:
        """Finds the changes by local steps since the last merge: shared − local in float32, a change with a minus sign.

        `encode` sends them, unless another method was called in between.

        Returns:
            For each tensor, whether its change is finite.
        """
        return all_finite(self._subtract())

    def _subtract(self) -> Iterator[torch.Tensor]:
        for tensor in self.tensors:
            torch.sub(tensor.values, tensor.local, out=tensor.scratch)
            if tensor.offset is not None:
                tensor.scratch.sub_(tensor.offset)
            yield tensor.scratch

    def encode(self) -> Frames:
        """Yields every table with its frame of the changes that `find_changes` found, all of them finite."""
        parts = [tensor.scratch[table.span] for tensor in self.tensors for table in tensor.tables]
        parts, begin = prepare_all(self._tables, parts), self._now()
        frames = self._set.encode(Flats.of(parts))
        nbytes = [table.context.payload_nbytes for table in self._tables if table.context is not None]
        count_pushes(self._tables, nbytes, self._now() - begin)
        yield from zip(self._tables, frames, strict=True)

    # ---- down

    def copy_shared(self) -> list[torch.Tensor]:
        """Returns copies of the shared parameters, float32[n] each, in memory that the next call uses again."""
        copies = [tensor.scratch for tensor in self.tensors]
        torch._foreach_copy_(copies, self._shared)
        return copies

    def apply(self, pulled: Pulled, step: int) -> None:
        """Applies updates to the shared parameters.

        Args:
            pulled: every table with its updates.
            step: to which they belong, for the records.
        """
        found = {id(table): updates for table, updates in pulled}
        for table, _ in pulled:
            table.begin_update()
        begin, deltas = self._now(), [_only_delta(found.get(id(table), ())) for table in self._tables]
        nbytes = self._set.add(deltas, self._values)
        if done := [(table, size) for table, size in zip(self._tables, nbytes, strict=True) if size]:
            added = [table for table, _ in done]
            count_pulls(added, [size for _, size in done], self._now() - begin)
            for table in added:
                table.note_change(step)
        known = {id(table) for table, _ in done}
        for table, updates in pulled:
            if id(table) in known:
                table.end_update()
            elif updates:
                table.apply(updates, None, step=step)

    def merge(self, keep: float, keep_unsent: float) -> None:
        """Continues the local parameters from the shared ones; see `WorkerTensor.merged`."""
        merged = [tensor.merged(keep, keep_unsent) for tensor in self.tensors]
        elsewhere = [
            (tensor.shown, values.view(tensor.shown.shape))
            for tensor, values in zip(self.tensors, merged, strict=True)
            if values is not tensor.memory
        ]
        if elsewhere:
            torch._foreach_copy_([shown for shown, _ in elsewhere], [values for _, values in elsewhere])
        for tensor, values in zip(self.tensors, merged, strict=True):
            tensor.note_offset(differs=values is not tensor.values)


def _only_delta(updates: Sequence[Update]) -> EncodedTensor:
    """Returns the frame to add, where there is just one; empty where the table's own method must apply the updates."""
    if len(updates) != 1:
        return b""
    [update] = updates
    return b"" if update.missed or update.whole or update.version <= 0 else update.frame
