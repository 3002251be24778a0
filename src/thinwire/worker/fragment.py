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

from thinwire.codecs.ternary_batch import TernaryBatch, takes
from thinwire.kernels.numba.many import largest_of_many
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.packets.batch import rounded
from thinwire.worker.apply_buffer import Update
from thinwire.worker.batching import Batching
from thinwire.worker.model import WorkerTensor
from thinwire.worker.table import WorkerTable

Frames = Iterator[tuple[WorkerTable, EncodedTensor]]


class Fragment:
    """Some tensors of a model at one worker, and their tables.

    Args:
        tensors: in the model's order.
        now: returns a time in seconds.
    """

    def __init__(self, tensors: Sequence[WorkerTensor], now: Callable[[], float]) -> None:
        self.tensors = tensors
        self._now = now
        self._shown = [tensor.shown for tensor in tensors]
        self._shared = [tensor.values for tensor in tensors]
        self._rounds = [each.dtype != torch.float32 for each in self._shown]
        self._on_host = all(each.is_cpu for each in self._shared)
        self._room: list[torch.Tensor] = []
        self._places = [(place, table) for place, tensor in enumerate(tensors) for table in tensor.tables]
        self._ternary = [each for each in self._places if _is_ternary(each[1])]
        batched = [each for each in self._places if each[1].is_batched]
        self._vectors = [[each for each in batched if each[1].is_narrow == narrow] for narrow in (False, True)]
        together = {id(table) for _, table in self._ternary + batched}
        self._alone = [each for each in self._places if id(each[1]) not in together]
        contexts = [table.context for _, table in self._ternary if table.context is not None]
        self._batch = TernaryBatch(contexts) if contexts else None
        self._outs = np.array([table.values.data_ptr() for _, table in self._ternary], np.int64)

    # ---- up

    def updates(self) -> list[torch.Tensor]:
        """Returns what local steps have changed since the last merge, with a minus sign: shared − local, float32.

        They are valid until the next call of any method.
        """
        changes = self._difference(self._reused())
        offsets = [(change, t.offset) for change, t in zip(changes, self.tensors, strict=True) if t.offset is not None]
        if offsets:
            torch._foreach_sub_([change for change, _ in offsets], [offset for _, offset in offsets])
        return changes

    def encode(self, updates: Sequence[torch.Tensor], batching: Batching) -> Frames:
        """Yields every table with what is pushed of it.

        Args:
            updates: what `updates` returned, all of them finite.
            batching: takes those on a GPU.
        """
        yield from self._encode_ternary(updates)
        for places in self._vectors:
            yield from self._encode_vectors(updates, places)
        for place, table in self._alone:
            part = updates[place][table.span].view(table.spec.shape)
            if table.encodes_in_batches:
                yield from batching.add(table, part)
            else:
                yield table, table.encode(part, None)
        yield from batching.finish()

    def _encode_ternary(self, updates: Sequence[torch.Tensor]) -> Frames:
        if self._batch is None:
            return
        parts = [table.prepare(updates[place][table.span]) for place, table in self._ternary]
        begin = self._now()
        frames = self._batch.encode(np.array([part.data_ptr() for part in parts], np.int64))
        share = (self._now() - begin) / len(parts)
        for number, (_, table) in enumerate(self._ternary):
            if frames is None:  # a scale overflows: the table's own error says whose
                yield table, table.encode(parts[number].view(table.spec.shape), None)
            else:
                table.encoded(share)
                yield table, frames[number]

    def _encode_vectors(self, updates: Sequence[torch.Tensor], places: Sequence[tuple[int, WorkerTable]]) -> Frames:
        if not places:
            return
        parts = [table.prepare(updates[place][table.span]) for place, table in places]
        begin, narrow = self._now(), places[0][1].is_narrow
        values = torch.cat(parts).numpy()
        values = rounded(values) if narrow else values
        finite = bool(np.isfinite(values).all())
        share, at = (self._now() - begin) / len(parts), 0
        for part, (_, table) in zip(parts, places, strict=True):
            if finite:
                frame = BatchedTensor(values[at : at + part.numel()], narrow)
                table.batched(frame, share)
                yield table, frame
            else:  # one rounds to Inf: the table's own error says whose
                yield table, table.encode(part.view(table.spec.shape), None)
            at += part.numel()

    # ---- down

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
        decoded = self._batch.decode(frames, self._outs, [True] * len(frames))
        share, done = (self._now() - begin) / len(frames), set()
        for (_, table), nbytes in zip(self._ternary, decoded, strict=True):
            if nbytes:
                table.applied(nbytes, share, step)
                done.add(id(table))
        return done

    def _apply_vectors(self, found: dict[int, Sequence[Update]], step: int) -> set[int]:
        """Adds what came in a batch; returns which tables these are."""
        fitting: list[tuple[WorkerTable, BatchedTensor]] = []
        for _, table in (*self._vectors[False], *self._vectors[True]):
            delta = _only_delta(found.get(id(table), ()))
            if isinstance(delta, BatchedTensor) and delta.fits(table.values.numel()):
                fitting.append((table, delta))
        if not fitting:
            return set()
        begin = self._now()
        deltas = [torch.from_numpy(delta.values) for _, delta in fitting]
        torch._foreach_add_([table.values.view(-1) for table, _ in fitting], deltas)
        share = (self._now() - begin) / len(fitting)
        for table, delta in fitting:
            table.applied(len(delta), share, step)
        return {id(table) for table, _ in fitting}

    def merge(self, keep: float, keep_unsent: float) -> None:
        """Continues the local parameters from the shared ones.

        What then differs from the shared parameters, kept or by rounding to a parameter's own dtype, is remembered: no
        update holds it.

        Args:
            keep: the share of the local parameters, 0 … 1; the rest is the shared ones'.
            keep_unsent: the share of the residuals, 0 … 1, which is taken from the shared ones: it is a change with a
                minus sign, as updates are.
        """
        merged = self._reused() if keep or keep_unsent else self._shared
        if keep:
            for out, shared, local in zip(merged, self._shared, self._local(), strict=True):
                torch.lerp(shared, local, keep, out=out)
        elif keep_unsent:
            torch._foreach_copy_(merged, self._shared)
        if keep_unsent:
            unsent = [(merged[place][t.span], t.residual) for place, t in self._places if t.residual is not None]
            residuals = [residual for _, residual in unsent if residual is not None]
            if residuals:
                unsent_share = residuals if keep_unsent == 1 else torch._foreach_mul(residuals, keep_unsent)
                torch._foreach_sub_([part for part, _ in unsent], unsent_share)
        torch._foreach_copy_(self._shown, [each.view_as(s) for each, s in zip(merged, self._shown, strict=True)])
        differs = [bool(keep or keep_unsent) or rounds for rounds in self._rounds]
        if any(differs):
            kept = [torch.empty_like(t.values) if t.offset is None else t.offset for t in self.tensors]
            offsets = self._difference(kept)
        for number, tensor in enumerate(self.tensors):
            tensor.offset = offsets[number] if differs[number] else None

    def _difference(self, outs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns shared − local, in the host's memory in `outs`: pages that are new cost more than the arithmetic."""
        if not self._on_host:
            return list(torch._foreach_sub(self._shared, self._local()))
        for out, shared, local in zip(outs, self._shared, self._local(), strict=True):
            torch.sub(shared, local, out=out)
        return outs

    def _reused(self) -> list[torch.Tensor]:
        """Room for all tensors, float32, which every method may use."""
        self._room = self._room or [torch.empty_like(each) for each in self._shared]
        return self._room

    def _local(self) -> list[torch.Tensor]:
        return [tensor.local for tensor in self.tensors]


def are_finite(updates: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each tensor holds no NaN or Inf."""
    plain = [each for each in updates if each.is_cpu and each.dtype == torch.float32 and each.is_contiguous()]
    if len(plain) == len(updates):
        places, sizes = ([f(each) for each in updates] for f in (torch.Tensor.data_ptr, torch.Tensor.numel))
        largest = largest_of_many(np.array(places, np.int64), np.array(sizes, np.int64))
        return [math.isfinite(each) for each in largest]
    return [math.isfinite(float(each.sum())) for each in updates]


def _is_ternary(table: WorkerTable) -> bool:
    return table.context is not None and table.values.is_cpu and table.context.size > 0 and takes(table.context)


def _only_delta(updates: Sequence[Update]) -> EncodedTensor:
    """What to add, where it is just one; empty where a table's own method must look at them."""
    if len(updates) != 1:
        return b""
    [update] = updates
    return b"" if update.missed or update.whole or update.version <= 0 else update.frame
