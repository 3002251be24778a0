"""Tables that a worker exchanges together: their changes are coded, and updates added, by as few calls as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from thinwire.codecs.flats import Flats
from thinwire.codecs.tensor_set import TensorSet
from thinwire.packets import EncodedTensor
from thinwire.worker.apply_buffer import Update
from thinwire.worker.costs import count_pulls, count_pushes
from thinwire.worker.table import WorkerTable, prepare_all

Frames = Iterator[tuple[WorkerTable, EncodedTensor]]

Pulled = Sequence[tuple[WorkerTable, Sequence[Update]]]
"""Every table with the updates that `Conversation.pull` returned."""


class Fragment:
    """Some tables of a model at one worker.

    Args:
        tables: in the model's order, each with the memory of its changes.
        now: returns a time in seconds.

    Attributes:
        tables: without that.
        by_shard: by the shard that holds them.
    """

    def __init__(self, tables: Sequence[tuple[WorkerTable, torch.Tensor]], now: Callable[[], float]) -> None:
        self.tables, self._changes = [table for table, _ in tables], [change for _, change in tables]
        self._now = now
        self._values = Flats.of([table.values for table in self.tables])
        self.by_shard: dict[int, list[WorkerTable]] = {}
        for table in self.tables:
            self.by_shard.setdefault(table.shard, []).append(table)
        self._set = TensorSet(
            [table.context for table in self.tables if table.context is not None],
            [place for place, table in enumerate(self.tables) if table.travels_in_batch],
        )

    def encode(self) -> Frames:
        """Yields every table with the frame of its changes, all of them finite."""
        parts, begin = prepare_all(self.tables, self._changes), self._now()
        frames = self._set.encode(Flats.of(parts))
        nbytes = [table.context.payload_nbytes for table in self.tables if table.context is not None]
        count_pushes(self.tables, nbytes, self._now() - begin)
        yield from zip(self.tables, frames, strict=True)

    def apply(self, pulled: Pulled, step: int) -> None:
        """Applies updates to the shared parameters.

        Args:
            pulled: every table with its updates.
            step: to which they belong, for the records.
        """
        found = {id(table): updates for table, updates in pulled}
        for table, _ in pulled:
            table.begin_update()
        begin, deltas = self._now(), [_only_delta(found.get(id(table), ())) for table in self.tables]
        nbytes = self._set.add(deltas, self._values)
        if done := [(table, size) for table, size in zip(self.tables, nbytes, strict=True) if size]:
            added = [table for table, _ in done]
            count_pulls(added, [size for _, size in done], self._now() - begin)
            for table in added:
                table.note_change(step)
        known = {id(table) for table, _ in done}
        for table, updates in pulled:
            if id(table) in known:
                table.end_update(updates[0])
            elif updates:
                table.apply(updates, None, step=step)


def _only_delta(updates: Sequence[Update]) -> EncodedTensor:
    """Returns the frame to add, where there is just one; empty where the table's own method must apply the updates."""
    if len(updates) != 1:
        return b""
    [update] = updates
    return b"" if update.missed or update.whole or update.version <= 0 else update.frame
