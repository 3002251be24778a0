"""What local steps have changed in the tensors of a fragment, found and encoded by few calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.kernels.numba.addresses import Addresses
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.packets.batch import rounded
from thinwire.worker.batching import Batching
from thinwire.worker.costs import count_pushes
from thinwire.worker.finite import all_finite
from thinwire.worker.fragment_tables import FragmentTables
from thinwire.worker.rows import addresses
from thinwire.worker.table import WorkerTable, prepare_all

Frames = Iterator[tuple[WorkerTable, EncodedTensor]]


class Changes:
    """The way up of some tensors at one worker.

    Args:
        tables: the tensors, with their tables.
        now: returns a time in seconds.

    Attributes:
        for_norms: what 3LC codes was written out for its norm alone, which only some exchanges ask for.
    """

    def __init__(self, tables: FragmentTables, now: Callable[[], float]) -> None:
        self._tables, self._now = tables, now
        # What `look` found: local parameters, the share of residuals that they hold, changes that were written out, and
        # of others where they lie and scales.
        self._local: list[torch.Tensor] = []
        self._unsent: float | None = None
        self._changes: list[torch.Tensor] | None = None
        self._others: Addresses | None = None
        self._scales: NDArray[np.float32] | None = None
        self.for_norms = False

    def look(self) -> list[bool]:
        """Finds what local steps have changed since the last merge: shared − local, in float32, a minus sign before it.

        `encode` sends what was found, where nothing else was called in between.

        Returns:
            Of each tensor, whether that is finite.
        """
        self._local, self._unsent = [tensor.local for tensor in self._tables.tensors], self._unsent_share()
        self._scales, self._changes, self.for_norms = None, None, False
        if not self._tables.on_host:
            self._changes = list(torch._foreach_sub(self._tables.shared, self._local))
            offsets = [
                (c, t.offset) for c, t in zip(self._changes, self._tables.tensors, strict=True) if t.offset is not None
            ]
            if offsets:
                torch._foreach_sub_([change for change, _ in offsets], [offset for _, offset in offsets])
            return all_finite(self._changes)
        local = addresses(self._local)
        if self._tables.batch is not None and not self._written_out():
            self._others = self._tables.coded.of(local)
            self._scales = self._tables.batch.scales(self._tables.coded.shared, self._others, unsent=self._unsent)
        rows = self._tables.all if self._scales is None else self._tables.not_coded
        self._changes = self._tables.room()
        kept = (
            rows.of(addresses([t.offset for t in self._tables.tensors])) if self._unsent is None else rows.residuals()
        )
        found = rows.subtract(local, kept, addresses(self._changes), self._unsent)
        finite = [True] * len(self._tables.tensors)
        for place, largest in zip(rows.places, found, strict=True):
            finite[place] &= math.isfinite(largest)
        return finite

    def _unsent_share(self) -> float | None:
        """The share of the residuals that all local parameters began without; None where offsets say it, or nothing."""
        shares = {tensor.unsent for tensor in self._tables.tensors}
        if self._tables.is_plain and len(shares) == 1:
            return shares.pop() or None
        for tensor in self._tables.tensors:
            tensor.offset, tensor.unsent = tensor.held_back(), 0.0
        return None

    def _written_out(self) -> bool:
        """Whether something beside the encoder reads the changes of what 3LC codes; otherwise they need no memory."""
        assert self._tables.batch is not None
        if self._unsent is not None and not self._tables.batch.finds_unsent:
            return True
        if any(t.offset is not None for t in self._tables.tensors):
            return True
        tables = [table for _, table in self._tables.ternary]
        asked = any(table.takes_norm for table in tables)
        self.for_norms = asked and not any(table.measures for table in tables)
        return asked

    def encode(self, batching: Batching) -> Frames:
        """Yields every table with what is pushed of what `look` found, all of it finite.

        Args:
            batching: takes tables on a GPU.
        """
        yield from self._encode_ternary()
        yield from self._encode_on_device(batching)
        for places in self._tables.vectors:
            yield from self._encode_vectors(places)
        for place, table in self._tables.alone:
            part = self._part(place, table).view(table.spec.shape)
            if table.encodes_in_batches:
                yield from batching.add(table, part)
            else:
                yield table, table.encode(part, None)
        yield from batching.finish()

    def release(self) -> None:
        """Gives the memory of what `look` found back to the system; it has been sent."""
        self._changes = None
        self._tables.release_room()

    def _part(self, place: int, table: WorkerTable) -> torch.Tensor:
        assert self._changes is not None
        return self._changes[place][table.span]

    def _encode_ternary(self) -> Frames:
        if self._tables.batch is None:
            return
        parts: list[torch.Tensor] = []
        if self._scales is None:
            parts = [table.prepare(self._part(place, table)) for place, table in self._tables.ternary]
            begin = self._now()
            frames = self._tables.batch.encode(addresses(parts))
        else:
            for _, table in self._tables.ternary:
                if table.revocable:
                    table.keep_residual()
            begin = self._now()
            frames = self._tables.batch.encode(
                self._tables.coded.shared, others=self._others, scales=self._scales, unsent=self._unsent
            )
        tables = [table for _, table in self._tables.ternary]
        if frames is None:  # a scale overflows: the table's own error says whose
            for part, table in zip(parts, tables, strict=True):
                yield table, table.encode(part.view(table.spec.shape), None)
            return
        count_pushes(tables, [table.context.payload_nbytes for table in tables if table.context], self._now() - begin)
        yield from zip(tables, frames, strict=True)

    def _encode_on_device(self, batching: Batching) -> Frames:
        for places, coder in self._tables.on_device:
            tables, frames = [table for _, table in places], None
            parts = [self._part(place, table) for place, table in places]
            begin = self._now()
            if all(table.context and table.context.lag_bound is None for table in tables):
                parts = prepare_all(tables, parts)
                frames = coder.encode(addresses(parts))
            if frames is None:  # or a scale overflows, and an error is to say whose
                for table, part in zip(tables, parts, strict=True):
                    yield from batching.add(table, part.view(table.spec.shape))
                continue
            nbytes = [table.context.payload_nbytes for table in tables if table.context]
            count_pushes(tables, nbytes, self._now() - begin)
            yield from zip(tables, frames, strict=True)

    def _encode_vectors(self, places: Sequence[tuple[int, WorkerTable]]) -> Frames:
        if not places:
            return
        assert self._changes is not None
        begin, tables, narrow = self._now(), [table for _, table in places], places[0][1].is_narrow
        if self._tables.on_host:
            values = np.concatenate([self._changes[place].numpy()[table.span] for place, table in places])
            for place, table in places:
                if table.takes_norm or table.revocable:
                    table.prepare(self._part(place, table))
        else:
            values = on_host(prepare_all(tables, [self._part(place, table) for place, table in places]))
        values = rounded(values) if narrow else values
        if not np.isfinite(values).all():  # one rounds to Inf: the table's own error says whose
            for place, table in places:
                yield table, table.encode(self._part(place, table).view(table.spec.shape), None)
            return
        frames, at = [], 0
        for table in tables:
            frames.append(BatchedTensor(values[at : at + table.size], narrow))
            at += table.size
        nbytes = [table.size * (2 if narrow else 4) for table in tables]
        for table, each in zip(tables, nbytes, strict=True):
            if table.context is not None:
                table.context.sent(each)
        count_pushes(tables, nbytes, self._now() - begin)
        yield from zip(tables, frames, strict=True)


def on_host(tensors: Sequence[torch.Tensor]) -> NDArray[np.float32]:
    """Returns the values of flat tensors end to end, in the host's memory; of those on one GPU by one copy."""
    if len({each.device for each in tensors}) > 1:
        return np.concatenate([each.cpu().numpy() for each in tensors])
    values: NDArray[np.float32] = torch.cat(list(tensors)).cpu().numpy()
    return values
