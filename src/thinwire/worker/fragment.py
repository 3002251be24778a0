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
from thinwire.kernels.numba.addresses import Addresses, add_to_many
from thinwire.kernels.numba.local_steps import continue_many
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.packets.batch import rounded
from thinwire.worker.apply_buffer import Update
from thinwire.worker.batching import Batching
from thinwire.worker.model import WorkerTensor
from thinwire.worker.rows import Lead, Rows, addresses
from thinwire.worker.table import WorkerTable, count_decoding, count_pulls, count_pushes

Frames = Iterator[tuple[WorkerTable, EncodedTensor]]


class Fragment:
    """Some tensors of a model at one worker, and their tables.

    Args:
        tensors: in the model's order.
        now: returns a time in seconds.

    Attributes:
        by_shard: every table with its tensor, by the shard that holds it.
        is_plain: whether the local values are the model's own float32 memory, on the host.
    """

    def __init__(self, tensors: Sequence[WorkerTensor], now: Callable[[], float]) -> None:
        self.tensors = tensors
        self._now = now
        self._shown = [tensor.shown for tensor in tensors]
        self._shared = [tensor.values for tensor in tensors]
        self._rounds = [each.dtype != torch.float32 for each in self._shown]
        self._on_host = all(each.is_cpu for each in self._shared)
        self.is_plain = self._on_host and all(tensor.is_plain for tensor in tensors)
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
        self._all, self._coded = Rows(self._places, tensors), Rows(self._ternary, tensors)
        self._not_coded = Rows([each for each in self._places if id(each[1]) not in coded], tensors)
        self._addend = {id(table): table.values.data_ptr() for _, table in batched}
        contexts = [table.context for _, table in self._ternary if table.context is not None]
        self._batch = TernaryBatch(contexts) if contexts else None
        # What `look` found: local parameters, the share of residuals that they hold, changes that were written out, and
        # of others where they lie and scales.
        self._local: list[torch.Tensor] = []
        self._unsent: float | None = None
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
        self._local, self._unsent = [tensor.local for tensor in self.tensors], self._unsent_share()
        self._scales, self._changes = None, None
        if not self._on_host:
            self._changes = list(torch._foreach_sub(self._shared, self._local))
            offsets = [(c, t.offset) for c, t in zip(self._changes, self.tensors, strict=True) if t.offset is not None]
            if offsets:
                torch._foreach_sub_([change for change, _ in offsets], [offset for _, offset in offsets])
            return [math.isfinite(float(each.sum())) for each in self._changes]
        local = addresses(self._local)
        if self._batch is not None and not self._written_out():
            self._others = self._coded.of(local)
            self._scales = self._batch.scales(self._coded.shared, self._others, unsent=self._unsent)
        rows = self._all if self._scales is None else self._not_coded
        self._changes = self._reused()
        kept = rows.of(addresses([t.offset for t in self.tensors])) if self._unsent is None else rows.residuals()
        found = rows.subtract(local, kept, addresses(self._changes), self._unsent)
        finite = [True] * len(self.tensors)
        for place, largest in zip(rows.places, found, strict=True):
            finite[place] &= math.isfinite(largest)
        return finite

    def _unsent_share(self) -> float | None:
        """The share of the residuals that all local parameters began without; None where offsets say it, or nothing."""
        shares = {tensor.unsent for tensor in self.tensors}
        if self.is_plain and len(shares) == 1:
            return shares.pop() or None
        for tensor in self.tensors:
            tensor.offset, tensor.unsent = tensor.held_back(), 0.0
        return None

    def _written_out(self) -> bool:
        """Whether something beside the encoder reads the changes of what 3LC codes; otherwise they need no memory."""
        assert self._batch is not None
        if self._unsent is not None and not self._batch.finds_unsent:
            return True
        return any(t.offset is not None for t in self.tensors) or any(table.takes_norm for _, table in self._ternary)

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
            frames = self._batch.encode(addresses(parts))
        else:
            for _, table in self._ternary:
                if table.revocable:
                    table.keep_residual()
            begin = self._now()
            frames = self._batch.encode(
                self._coded.shared, others=self._others, scales=self._scales, unsent=self._unsent
            )
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
        begin, deltas = self._now(), self._ternary_frames(found)
        decoded = self._batch.decode(deltas, self._coded.shared, [True] * len(deltas))
        return self._count_ternary(decoded, begin, step)

    def _ternary_frames(self, found: dict[int, Sequence[Update]]) -> list[bytes | memoryview]:
        deltas = [_only_delta(found.get(id(table), ())) for _, table in self._ternary]
        return [b"" if isinstance(delta, BatchedTensor) else delta for delta in deltas]

    def _count_ternary(self, decoded: Sequence[int], begin: float, step: int) -> set[int]:
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

    def continue_from(
        self,
        pulled: Sequence[tuple[WorkerTable, Sequence[Update]]],
        step: int,
        keep_unsent: float,
        leads: Sequence[Lead | None],
        lead_share: float,
    ) -> None:
        """`apply`, and `merge` without anything that is kept, and momenta that are led, each value touched once.

        For a fragment that `is_plain`.

        Args:
            pulled, step: as for `apply`.
            keep_unsent: as for `merge`.
            leads: of each tensor, which momentum is led by what the update changes.
            lead_share: of these momenta, which is replaced.
        """
        found, local = {id(table): updates for table, updates in pulled}, addresses([t.local for t in self.tensors])
        done = set()
        if self._batch is not None:
            begin, deltas = self._now(), self._ternary_frames(found)
            continued = self._coded.continued(local, keep_unsent, leads, lead_share)
            decoded = self._batch.decode_and_continue(deltas, self._coded.shared, continued)
            done = self._count_ternary(decoded, begin, step)
        rest = self._not_coded
        if len(done) < len(self._ternary):
            rest = Rows([each for each in self._places if id(each[1]) not in done], self.tensors)
        before = [
            None if leads[place] is None else table.values.clone()
            for place, table in zip(rest.places, rest.tables, strict=True)
        ]
        done |= self._apply_vectors(found, step)
        for table, updates in pulled:
            if updates and id(table) not in done:
                table.apply(updates, None, step=step)
        continue_many(addresses(before), rest.shared, rest.sizes, rest.continued(local, keep_unsent, leads, lead_share))
        self._hold(keep_unsent)

    def merge(self, keep: float, keep_unsent: float) -> None:
        """Continues the local parameters from the shared ones.

        What then differs from the shared parameters, kept or by rounding to a parameter's own dtype, is remembered: no
        update holds it.

        Args:
            keep: the share of the local parameters, 0 … 1; the rest is the shared ones'.
            keep_unsent: the share of the residuals, 0 … 1, which is taken from the shared ones: it is a change with a
                minus sign, as updates are.
        """
        if keep_unsent and not keep and self.is_plain:
            local, nothing = addresses([tensor.local for tensor in self.tensors]), [None] * len(self.tensors)
            continued = self._all.continued(local, keep_unsent, nothing, 0.0)
            continue_many(np.zeros_like(self._all.sizes), self._all.shared, self._all.sizes, continued)
            self._hold(keep_unsent)
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
            tensor.offset, tensor.unsent = tensor.offset if differing else None, 0.0

    def _hold(self, share: float) -> None:
        """Notes that the local parameters are the shared ones less a share of the residuals, and have been changed."""
        for tensor in self.tensors:
            tensor.offset, tensor.unsent = None, share
        increment_version(self._shown)  # a graph from before the change is not to be used after it

    def _reused(self) -> list[torch.Tensor]:
        """Room for all tensors, float32, which every method may use."""
        self._room = self._room or [torch.empty_like(each) for each in self._shared]
        return self._room


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
