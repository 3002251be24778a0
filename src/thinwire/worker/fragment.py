"""Tensors that are exchanged together: what local steps changed in all of them, and the merge, by few calls.

A call into torch or a kernel costs more than the arithmetic of a small tensor, and a model has dozens. So differences
and copies of all tensors are one call each, as are the frames and the decoding of those that 3LC codes in the host's
memory, and the decoding of those on a GPU; tensors that travel in a batch are rounded and added together. Any other
goes alone. The bits are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.autograd.graph import increment_version

from thinwire.codecs import CheckedFrame
from thinwire.codecs.decoding import fill_all
from thinwire.kernels.numba.addresses import add_to_many
from thinwire.kernels.numba.local_steps import continue_many
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.worker.apply_buffer import Update
from thinwire.worker.changes import Changes
from thinwire.worker.costs import count_decoding, count_pulls
from thinwire.worker.fragment_tables import FragmentTables
from thinwire.worker.model import WorkerTensor
from thinwire.worker.rows import Lead, Rows, addresses
from thinwire.worker.table import WorkerTable

Pulled = Sequence[tuple[WorkerTable, Sequence[Update]]]
"""Every table with what `Conversation.pull` returned of it."""


class Fragment:
    """Some tensors of a model at one worker, and their tables.

    Args:
        tensors: in the model's order.
        now: returns a time in seconds.

    Attributes:
        changes: finds and encodes what local steps have changed.
        by_shard: every table with its tensor, by the shard that holds it.
        is_plain: whether the local values are the model's own float32 memory, on the host.
    """

    def __init__(self, tensors: Sequence[WorkerTensor], now: Callable[[], float]) -> None:
        self.tensors, self._now = tensors, now
        self._tables = FragmentTables(tensors)
        self.changes, self.is_plain = Changes(self._tables, now), self._tables.is_plain
        self.by_shard: dict[int, list[tuple[WorkerTensor, WorkerTable]]] = {}
        for place, table in self._tables.places:
            self.by_shard.setdefault(table.shard, []).append((tensors[place], table))
        self._shown = [tensor.shown for tensor in tensors]
        self._rounds = [each.dtype != torch.float32 for each in self._shown]
        self._shared_as_shown = [each.view_as(s) for each, s in zip(self._tables.shared, self._shown, strict=True)]

    def copy_shared(self) -> list[torch.Tensor]:
        """Returns the shared parameters in memory that is used again from the next `look` or `merge` on."""
        copies = self._tables.room()
        torch._foreach_copy_(copies, self._tables.shared)
        return copies

    def apply(self, pulled: Pulled, step: int) -> None:
        """Applies updates to the shared parameters.

        Args:
            pulled: every table with what `Conversation.pull` returned of it.
            step: which step they belong to, for the records.
        """
        found = {id(table): updates for table, updates in pulled}
        for table, _ in pulled:
            table.changes()
        done = self._apply_ternary(found, step) | self._apply_vectors(found, step) | self._apply_on_device(found, step)
        for table, updates in pulled:
            if id(table) in done:
                table.changed()
            elif updates:
                table.apply(updates, None, step=step)

    def _apply_ternary(self, found: dict[int, Sequence[Update]], step: int) -> set[int]:
        """Applies what one call can; returns which tables these are."""
        if self._tables.batch is None:
            return set()
        begin, deltas = self._now(), self._ternary_frames(found)
        decoded = self._tables.batch.decode(deltas, self._tables.coded.shared, np.ones(len(deltas), np.bool_))
        return self._count_ternary(decoded, begin, step)

    def _ternary_frames(self, found: dict[int, Sequence[Update]]) -> list[bytes | memoryview]:
        return _frames([table for _, table in self._tables.ternary], found)

    def _count_ternary(self, decoded: Sequence[int], begin: float, step: int) -> set[int]:
        done = [(table, nbytes) for (_, table), nbytes in zip(self._tables.ternary, decoded, strict=True) if nbytes]
        return _applied(done, self._now() - begin, step)

    def _apply_vectors(self, found: dict[int, Sequence[Update]], step: int) -> set[int]:
        """Adds what came in a batch; returns which tables these are."""
        fitting: list[tuple[WorkerTable, BatchedTensor]] = []
        for _, table in (*self._tables.vectors[False], *self._tables.vectors[True]):
            delta = _only_delta(found.get(id(table), ()))
            if table.on_host and isinstance(delta, BatchedTensor) and delta.fits(table.size):
                fitting.append((table, delta))
        if not fitting:
            return set()
        begin = self._now()
        places, sizes = [table.values.data_ptr() for table, _ in fitting], [table.size for table, _ in fitting]
        values = np.concatenate([delta.values for _, delta in fitting])
        add_to_many(values, np.array(places, np.int64), np.array(sizes, np.int64))
        return _applied([(table, len(delta)) for table, delta in fitting], self._now() - begin, step)

    def _apply_on_device(self, found: dict[int, Sequence[Update]], step: int) -> set[int]:
        """Adds what came of tables on a GPU, by few launches; returns which tables these are."""
        begin, done = self._now(), self._apply_ternary_on_device(found)
        coded: list[tuple[WorkerTable, CheckedFrame]] = []
        batched: list[tuple[WorkerTable, BatchedTensor]] = []
        known = {id(table) for table, _ in done}
        for _, table in self._tables.places:
            delta = b"" if table.on_host or id(table) in known else _only_delta(found.get(id(table), ()))
            if not isinstance(delta, BatchedTensor):
                if delta:
                    coded.append((table, table.open(delta)))
            elif delta.fits(table.size):
                batched.append((table, delta))
        if coded:
            fill_all([frame for _, frame in coded], [table.values for table, _ in coded], [True] * len(coded))
        if batched:
            _add_batched(batched)
        done += [(table, frame.payload_nbytes) for table, frame in coded]
        done += [(table, len(delta)) for table, delta in batched]
        return _applied(done, self._now() - begin, step)

    def _apply_ternary_on_device(self, found: dict[int, Sequence[Update]]) -> list[tuple[WorkerTable, int]]:
        done: list[tuple[WorkerTable, int]] = []
        for places, coder in self._tables.on_device:
            tables = [table for _, table in places]
            outs = [table.values for table in tables]
            decoded = coder.decode(_frames(tables, found), addresses(outs), np.ones(len(outs), np.bool_))
            done += [(table, nbytes) for table, nbytes in zip(tables, decoded, strict=True) if nbytes]
        return done

    @property
    def is_led(self) -> bool:
        """Whether a momentum is added to shared values of some tensor."""
        return any(tensor.is_led for tensor in self.tensors)

    def continue_from(
        self,
        pulled: Pulled,
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
        if self._tables.batch is not None:
            begin, deltas = self._now(), self._ternary_frames(found)
            continued = self._tables.coded.continued(local, keep_unsent, leads, lead_share)
            decoded = self._tables.batch.decode_and_continue(deltas, self._tables.coded.shared, continued)
            done = self._count_ternary(decoded, begin, step)
        rest = self._tables.not_coded
        if len(done) < len(self._tables.ternary):
            rest = Rows([each for each in self._tables.places if id(each[1]) not in done], self.tensors)
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
        led = self.is_led
        if keep_unsent and not keep and self.is_plain and not led:
            local, nothing = addresses([tensor.local for tensor in self.tensors]), [None] * len(self.tensors)
            continued = self._tables.all.continued(local, keep_unsent, nothing, 0.0)
            continue_many(
                np.zeros_like(self._tables.all.sizes), self._tables.all.shared, self._tables.all.sizes, continued
            )
            self._hold(keep_unsent)
            return
        merged = self._tables.room() if keep or keep_unsent or led else self._tables.shared
        if merged is not self._tables.shared:
            torch._foreach_copy_(merged, self._tables.shared)
        for out, tensor in zip(merged, self.tensors, strict=True) if led else ():
            tensor.add_ahead(out)
        if keep:
            for out, tensor in zip(merged, self.tensors, strict=True):
                torch.lerp(out, tensor.local, keep, out=out)
        if keep_unsent:
            unsent = [(merged[place][t.span], t.residual) for place, t in self._tables.places if t.residual is not None]
            residuals = [residual for _, residual in unsent if residual is not None]
            if residuals:
                unsent_share = residuals if keep_unsent == 1 else torch._foreach_mul(residuals, keep_unsent)
                torch._foreach_sub_([part for part, _ in unsent], unsent_share)
        as_shown = self._shared_as_shown
        if merged is not self._tables.shared:
            as_shown = [each.view_as(s) for each, s in zip(merged, self._shown, strict=True)]
        torch._foreach_copy_(self._shown, as_shown)
        differs = [bool(keep or keep_unsent or led) or rounds for rounds in self._rounds]
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


def _add_batched(batched: Sequence[tuple[WorkerTable, BatchedTensor]]) -> None:
    """Adds values from a message's batch to tables on GPUs: one copy for each GPU."""
    for device in {table.values.device for table, _ in batched}:
        some = [(table, delta.values) for table, delta in batched if table.values.device == device]
        values = torch.from_numpy(np.concatenate([each for _, each in some])).to(device)
        outs = [table.values.view(-1) for table, _ in some]
        torch._foreach_add_(outs, list(torch.split(values, [out.numel() for out in outs])))


def _frames(tables: Sequence[WorkerTable], found: dict[int, Sequence[Update]]) -> list[bytes | memoryview]:
    """Of each table the frame to add, where it is just one; empty where there is none, or values from a batch."""
    deltas = [_only_delta(found.get(id(table), ())) for table in tables]
    return [b"" if isinstance(delta, BatchedTensor) else delta for delta in deltas]


def _only_delta(updates: Sequence[Update]) -> EncodedTensor:
    """What to add, where it is just one; empty where a table's own method must look at them."""
    if len(updates) != 1:
        return b""
    [update] = updates
    return b"" if update.missed or update.whole or update.version <= 0 else update.frame
