"""Tensors that are exchanged together: what local steps changed in all of them, and the merge, by few calls.

A call into torch or a kernel costs more than the arithmetic of a small tensor, and a model has dozens. So differences
and copies of all tensors are one call each, as are the frames and the decoding of those that 3LC codes in the host's
memory; tensors that travel in a batch are rounded and added together. Any other goes alone. The bits are the same
either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.graph import increment_version

from thinwire.codecs.ternary_batch import TernaryBatch, takes
from thinwire.kernels.numba.addresses import Addresses, add_to_many, subtract_many
from thinwire.kernels.numba.local_steps import keep_unsent_many
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.packets.batch import rounded
from thinwire.worker.apply_buffer import Update
from thinwire.worker.batching import Batching
from thinwire.worker.model import WorkerTensor
from thinwire.worker.table import WorkerTable, count_decoding, count_pulls, count_pushes

Frames = Iterator[tuple[WorkerTable, EncodedTensor]]


class Fragment:
    """Some tensors of a model at one worker, and their tables.

    Args:
        tensors: in the model's order.
        now: returns a time in seconds.

    Attributes:
        by_shard: every table with its tensor, by the shard that holds it.
    """

    def __init__(self, tensors: Sequence[WorkerTensor], now: Callable[[], float]) -> None:
        self.tensors = tensors
        self._now = now
        self._shown = [tensor.shown for tensor in tensors]
        self._shared = [tensor.values for tensor in tensors]
        self._rounds = [each.dtype != torch.float32 for each in self._shown]
        self._on_host = all(each.is_cpu for each in self._shared)
        self._is_plain = self._on_host and all(tensor.is_plain for tensor in tensors)
        self._room: list[torch.Tensor] = []
        self._shared_as_shown = [each.view_as(s) for each, s in zip(self._shared, self._shown, strict=True)]
        self._places = [(place, table) for place, tensor in enumerate(tensors) for table in tensor.tables]
        self.by_shard: dict[int, list[tuple[WorkerTensor, WorkerTable]]] = {}
        for place, table in self._places:
            self.by_shard.setdefault(table.shard, []).append((tensors[place], table))
        self._ternary = [each for each in self._places if _is_ternary(each[1])]
        batched = [each for each in self._places if each[1].is_batched]
        self._vectors = [[each for each in batched if each[1].is_narrow == narrow] for narrow in (False, True)]
        together = {id(table) for _, table in self._ternary + batched}
        self._alone = [each for each in self._places if id(each[1]) not in together]
        coded = {id(table) for _, table in self._ternary}
        self._all, self._coded = _Rows(self._places, tensors), _Rows(self._ternary, tensors)
        self._not_coded = _Rows([each for each in self._places if id(each[1]) not in coded], tensors)
        self._addend = {id(table): table.values.data_ptr() for _, table in batched}
        contexts = [table.context for _, table in self._ternary if table.context is not None]
        self._batch = TernaryBatch(contexts) if contexts else None
        # What `look` found: local parameters, changes that were written out, and of others where they lie and scales.
        self._local: list[torch.Tensor] = []
        self._changes: list[torch.Tensor] | None = None
        self._others: Addresses | None = None
        self._scales: NDArray[np.float32] | None = None

    # ---- up

    def look(self) -> list[bool]:
        """Finds what local steps have changed since the last merge: shared − local, in float32, a minus sign before it.

        `encode` sends what was found, where nothing else was called in between.

        Returns:
            Of each tensor, whether that is finite.
        """
        self._local = [tensor.local for tensor in self.tensors]
        self._scales, self._changes = None, None
        if not self._on_host:
            self._changes = list(torch._foreach_sub(self._shared, self._local))
            offsets = [(c, t.offset) for c, t in zip(self._changes, self.tensors, strict=True) if t.offset is not None]
            if offsets:
                torch._foreach_sub_([change for change, _ in offsets], [offset for _, offset in offsets])
            return [math.isfinite(float(each.sum())) for each in self._changes]
        local = _addresses(self._local)
        kept = np.array([0 if t.offset is None else t.offset.data_ptr() for t in self.tensors], np.int64)
        if self._batch is not None and not self._written_out(kept):
            self._others = self._coded.of(local)
            self._scales = self._batch.scales(self._coded.shared, self._others)
        rows = self._all if self._scales is None else self._not_coded
        self._changes = self._reused()
        finite = [True] * len(self.tensors)
        for place, largest in zip(rows.places, rows.subtract(local, kept, _addresses(self._changes)), strict=True):
            finite[place] &= math.isfinite(largest)
        return finite

    def _written_out(self, offsets: Addresses) -> bool:
        """Whether something beside the encoder reads the changes of what 3LC codes; otherwise they need no memory."""
        return bool(offsets.any()) or any(table.takes_norm for _, table in self._ternary)

    def encode(self, batching: Batching) -> Frames:
        """Yields every table with what is pushed of what `look` found, all of it finite.

        Args:
            batching: takes tables on a GPU.
        """
        yield from self._encode_ternary()
        for places in self._vectors:
            yield from self._encode_vectors(places)
        for place, table in self._alone:
            part = self._part(place, table).view(table.spec.shape)
            if table.encodes_in_batches:
                yield from batching.add(table, part)
            else:
                yield table, table.encode(part, None)
        yield from batching.finish()

    def _part(self, place: int, table: WorkerTable) -> torch.Tensor:
        assert self._changes is not None
        return self._changes[place][table.span]

    def _encode_ternary(self) -> Frames:
        if self._batch is None:
            return
        parts: list[torch.Tensor] = []
        if self._scales is None:
            parts = [table.prepare(self._part(place, table)) for place, table in self._ternary]
            begin = self._now()
            frames = self._batch.encode(_addresses(parts))
        else:
            for _, table in self._ternary:
                if table.revocable:
                    table.keep_residual()
            begin = self._now()
            frames = self._batch.encode(self._coded.shared, others=self._others, scales=self._scales)
        tables = [table for _, table in self._ternary]
        if frames is None:  # a scale overflows: the table's own error says whose
            for part, table in zip(parts, tables, strict=True):
                yield table, table.encode(part.view(table.spec.shape), None)
            return
        count_pushes(tables, [table.context.payload_nbytes for table in tables if table.context], self._now() - begin)
        yield from zip(tables, frames, strict=True)

    def _encode_vectors(self, places: Sequence[tuple[int, WorkerTable]]) -> Frames:
        if not places:
            return
        assert self._changes is not None
        begin, tables, narrow = self._now(), [table for _, table in places], places[0][1].is_narrow
        values = np.concatenate([self._changes[place].numpy()[table.span] for place, table in places])
        for place, table in places:
            if table.takes_norm or table.revocable:
                table.prepare(self._part(place, table))
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

    # ---- down

    def copy_shared(self) -> list[torch.Tensor]:
        """Returns the shared parameters in memory that is used again from the next `look` or `merge` on."""
        copies = self._reused()
        torch._foreach_copy_(copies, self._shared)
        return copies

    def apply(self, pulled: Sequence[tuple[WorkerTable, Sequence[Update]]], step: int) -> None:
        """Applies updates to the shared parameters.

        Args:
            pulled: every table with what `Conversation.pull` returned of it.
            step: which step they belong to, for the records.
        """
        found = {id(table): updates for table, updates in pulled}
        done = self._apply_ternary(found, step) | self._apply_vectors(found, step)
        for table, updates in pulled:
            if updates and id(table) not in done:
                table.apply(updates, None, step=step)

    def _apply_ternary(self, found: dict[int, Sequence[Update]], step: int) -> set[int]:
        """Applies what one call can; returns which tables these are."""
        if self._batch is None:
            return set()
        deltas = [_only_delta(found.get(id(table), ())) for _, table in self._ternary]
        frames = [b"" if isinstance(delta, BatchedTensor) else delta for delta in deltas]
        begin = self._now()
        decoded = self._batch.decode(frames, self._coded.shared, [True] * len(frames))
        done = [(table, nbytes) for (_, table), nbytes in zip(self._ternary, decoded, strict=True) if nbytes]
        return _applied(done, self._now() - begin, step)

    def _apply_vectors(self, found: dict[int, Sequence[Update]], step: int) -> set[int]:
        """Adds what came in a batch; returns which tables these are."""
        fitting: list[tuple[WorkerTable, BatchedTensor]] = []
        for _, table in (*self._vectors[False], *self._vectors[True]):
            delta = _only_delta(found.get(id(table), ()))
            if isinstance(delta, BatchedTensor) and delta.fits(table.size):
                fitting.append((table, delta))
        if not fitting:
            return set()
        begin = self._now()
        places, sizes = [self._addend[id(table)] for table, _ in fitting], [table.size for table, _ in fitting]
        values = np.concatenate([delta.values for _, delta in fitting])
        add_to_many(values, np.array(places, np.int64), np.array(sizes, np.int64))
        return _applied([(table, len(delta)) for table, delta in fitting], self._now() - begin, step)

    def merge(self, keep: float, keep_unsent: float) -> None:
        """Continues the local parameters from the shared ones.

        What then differs from the shared parameters, kept or by rounding to a parameter's own dtype, is remembered: no
        update holds it.

        Args:
            keep: the share of the local parameters, 0 … 1; the rest is the shared ones'.
            keep_unsent: the share of the residuals, 0 … 1, which is taken from the shared ones: it is a change with a
                minus sign, as updates are.
        """
        if keep_unsent and not keep and self._is_plain:
            self._keep_unsent(keep_unsent)
            return
        merged = self._reused() if keep or keep_unsent else self._shared
        if keep:
            for out, shared, tensor in zip(merged, self._shared, self.tensors, strict=True):
                torch.lerp(shared, tensor.local, keep, out=out)
        elif keep_unsent:
            torch._foreach_copy_(merged, self._shared)
        if keep_unsent:
            unsent = [(merged[place][t.span], t.residual) for place, t in self._places if t.residual is not None]
            residuals = [residual for _, residual in unsent if residual is not None]
            if residuals:
                unsent_share = residuals if keep_unsent == 1 else torch._foreach_mul(residuals, keep_unsent)
                torch._foreach_sub_([part for part, _ in unsent], unsent_share)
        as_shown = self._shared_as_shown
        if merged is not self._shared:
            as_shown = [each.view_as(s) for each, s in zip(merged, self._shown, strict=True)]
        torch._foreach_copy_(self._shown, as_shown)
        differs = [bool(keep or keep_unsent) or rounds for rounds in self._rounds]
        if any(differs):
            for tensor, differing in zip(self.tensors, differs, strict=True):
                if differing:
                    # Pages that are new cost more than the arithmetic.
                    kept = torch.empty_like(tensor.values) if tensor.offset is None else tensor.offset
                    tensor.offset = torch.sub(tensor.values, tensor.local, out=kept)
        for tensor, differing in zip(self.tensors, differs, strict=True):
            tensor.offset = tensor.offset if differing else None

    def _keep_unsent(self, share: float) -> None:
        """`merge` where only the residuals stay, by one pass over the memory."""
        for tensor in self.tensors:
            if tensor.offset is None:
                tensor.offset = torch.empty_like(tensor.values)
        residuals = [table.residual for _, table in self._places]
        offsets = [tensor.offset for tensor in self.tensors if tensor.offset is not None]
        keep_unsent_many(
            self._all.shared,
            np.array([0 if each is None else each.data_ptr() for each in residuals], np.int64),
            share,
            self._all.of(_addresses([tensor.local for tensor in self.tensors])),
            self._all.of(_addresses(offsets)),
            self._all.sizes,
        )
        increment_version(self._shown)  # a graph from before the change is not to be used after it

    def _reused(self) -> list[torch.Tensor]:
        """Room for all tensors, float32, which every method may use."""
        self._room = self._room or [torch.empty_like(each) for each in self._shared]
        return self._room


class _Rows:
    """Where some tables lie in the host's memory: each at its place in its tensor's arrays, whichever these are.

    Args:
        places: the tables, each with the number of its tensor.
        tensors: of the fragment.
    """

    def __init__(self, places: Sequence[tuple[int, WorkerTable]], tensors: Sequence[WorkerTensor]) -> None:
        self.places = [place for place, _ in places]
        self._places = np.array(self.places, np.int64)
        self._begins = np.array([4 * table.span.start for _, table in places], np.int64)
        self.sizes = np.array([table.values.numel() for _, table in places], np.int64)
        self.shared = self.of(_addresses([tensor.values for tensor in tensors]))

    def of(self, tensors: Addresses) -> Addresses:
        """Where the tables lie, given where float32 arrays of all tensors do."""
        return tensors[self._places] + self._begins

    def subtract(self, local: Addresses, offsets: Addresses, outs: Addresses) -> list[float]:
        """See `subtract_many`; all are given as for `of`, and no offset as 0."""
        begins = np.where(offsets[self._places] != 0, self.of(offsets), 0)
        return subtract_many(self.shared, self.of(local), begins, self.of(outs), self.sizes)


def _addresses(tensors: Sequence[torch.Tensor]) -> Addresses:
    return np.array([each.data_ptr() for each in tensors], np.int64)


def _applied(done: Sequence[tuple[WorkerTable, int]], seconds: float, step: int) -> set[int]:
    """Counts updates by their payloads' sizes, applied together in so many seconds; returns which tables these are."""
    if not done:
        return set()
    tables = [table for table, _ in done]
    count_pulls(tables, [nbytes for _, nbytes in done])
    count_decoding(tables, seconds)
    if tables[0].measures:
        for table in tables:
            table.note_change(step)
    return set(map(id, tables))


def _is_ternary(table: WorkerTable) -> bool:
    return table.context is not None and table.values.is_cpu and table.context.size > 0 and takes(table.context)


def _only_delta(updates: Sequence[Update]) -> EncodedTensor:
    """What to add, where it is just one; empty where a table's own method must look at them."""
    if len(updates) != 1:
        return b""
    [update] = updates
    return b"" if update.missed or update.whole or update.version <= 0 else update.frame
