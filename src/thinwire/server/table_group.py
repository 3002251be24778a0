"""Tables that come in one message: their gradients are added, and their updates encoded, as one set of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

import numpy as np

from thinwire.codecs import CheckedFrame
from thinwire.codecs.flats import Flats, average
from thinwire.codecs.tensor_set import Checked, TensorSet, naming
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import FrameError, ProtocolError
from thinwire.packets import EncodedTensor
from thinwire.server.copies import Copy
from thinwire.server.downlinks import ModelDelta
from thinwire.server.table import Table

MAX_GROUPS = 256
"""Tables come in a few combinations; groups of further ones are made anew."""


class TableGroups:
    """The tables of a shard, of which a message holds some.

    Args:
        tables: in the order of the plan.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._groups: dict[tuple[int, ...], TableGroup] = {}

    def of(self, indices: Iterable[int]) -> TableGroup:
        """Returns some of them together."""
        key = tuple(indices)
        if key not in self._groups:
            if len(self._groups) >= MAX_GROUPS:
                self._groups.clear()
            self._groups[key] = TableGroup(self, key, [self._tables[index] for index in key])
        return self._groups[key]


class TableGroup:
    """Some tables of a shard.

    Args:
        groups: of which this is one.
        indices: the tables', in the plan.
        tables: in the same order.
    """

    def __init__(self, groups: TableGroups, indices: tuple[int, ...], tables: Sequence[Table]) -> None:
        self.indices, self.tables = indices, tables
        self._groups = groups

    def part(self, places: Iterable[int]) -> TableGroup:
        """Returns some of these, by their places."""
        return self._groups.of(self.indices[place] for place in places)

    def with_others(self, others: Iterable[TableGroup]) -> TableGroup:
        """Returns these and other groups' as one, in the order of the plan."""
        return self._groups.of(sorted([*self.indices, *(index for each in others for index in each.indices)]))

    # What calls for all of the tables need is prepared once, and not before one is made.

    @cached_property
    def _pushes(self) -> TensorSet:
        return TensorSet(
            [table.pushes for table in self.tables], [p for p, each in enumerate(self.tables) if each.is_batched]
        )

    @cached_property
    def _pulls(self) -> TensorSet | None:
        """None where the server updates no model."""
        deltas = [table.downlink for table in self.tables if isinstance(table.downlink, ModelDelta)]
        if len(deltas) < len(self.tables):
            return None
        return TensorSet([each.pulls for each in deltas], [p for p, each in enumerate(deltas) if each.is_batched])

    @cached_property
    def _sums(self) -> Flats:
        return Flats.of([table.sum for table in self.tables])

    @cached_property
    def _values(self) -> Flats:
        return Flats.of([table.downlink.values for table in self.tables])

    # ---- gradients

    def check(self, frames: Sequence[EncodedTensor]) -> tuple[list[Checked], set[int]]:
        """Checks one frame for each table.

        Returns:
            The gradients to add, and the indices of tables whose sender refused: its gradient was not finite.

        Raises:
            ProtocolError: a frame is no gradient of its table, in the codec that was agreed on.
        """
        try:
            checked = self._pushes.check(frames)
        except FrameError as error:
            raise ProtocolError(str(error)) from error
        refused = set()
        for index, table, frame, each in zip(self.indices, self.tables, frames, checked, strict=True):
            if isinstance(each, CheckedFrame):
                if each.frame.codec != (agreed := table.pushes.codec.id):
                    raise ProtocolError(f"{table.spec.name}: codec {each.frame.codec!r} came, {agreed!r} was agreed on")
                table.scale = each.frame.scales[0] if each.frame.scales else table.scale
            elif each is None and len(frame):
                refused.add(index)
        return checked, refused

    def add(self, rank: int, gradients: Sequence[Checked], *, but: Collection[int] = ()) -> None:
        """Adds one worker's gradients, which `check` has returned, to the sums.

        Args:
            rank: whose, for the error.
            gradients: one for each table.
            but: indices of tables that are left out.

        Raises:
            FrameError: a payload is damaged; the table's sum is what it was, those of others may have changed.
        """
        given = [None if i in but else each for i, each in zip(self.indices, gradients, strict=True)]
        counts = np.array([table.num_added for table in self.tables], np.int64)
        means = [(place, table.means) for place, table in enumerate(self.tables) if table.means is not None]
        sums = given if not means else [None if t.means else each for t, each in zip(self.tables, given, strict=True)]
        try:
            self._pushes.add(sums, self._sums, counts)
            for place, mean in means:
                if isinstance(each := given[place], CheckedFrame):
                    with naming(self.tables[place].pushes):
                        mean.add(each, first=counts[place] == 0)
                    counts[place] += 1
        except FrameError as error:
            raise FrameError(f"the gradient of worker {rank}: {error}") from error
        finally:
            for table, count in zip(self.tables, counts.tolist(), strict=True):
                table.num_added = count

    def take(self) -> list[FloatArray | None]:
        """Ends the sums, which the next ones overwrite; returns every aggregate, None without a gradient."""
        found: list[FloatArray | None] = []
        for table in self.tables:
            given, table.num_added = table.num_added, 0
            table.downlink.senders = given or table.downlink.senders
            if given and table.means is not None:
                table.means.fill()
            elif given and table.reduce != "sum":
                average(table.sum.reshape(-1), given)
            found.append(table.sum if given else None)
        return found

    # ---- updates

    def encode(self, changed: Sequence[bool]) -> list[EncodedTensor | None]:
        """Encodes the difference between some tables and the workers' copies, and updates these copies.

        Args:
            changed: of each table, whether it is to be encoded.

        Returns:
            Each frame; None where `Table.publish` must make it: the table goes one by one, or holds NaN or Inf.
        """
        lacking = self._lacking() if all(changed) else []  # as it is but for tables that took no part in the step
        if not lacking or self._pulls is None:
            return [None] * len(self.tables)
        copies = self._placed([copy.address for copy in lacking], [copy.values for copy in lacking])
        bases = self._placed([copy.base_address for copy in lacking], [copy.base for copy in lacking])
        made = self._pulls.encode_together(self._values, bases, outs=copies, bounds=[copy.lag for copy in lacking])
        for table, copy, frame in zip(self.tables, lacking, made, strict=True):
            if frame is not None and isinstance(table.downlink, ModelDelta):
                table.downlink.sent(copy)
        return made

    def _placed(self, addresses: Sequence[int], arrays: Sequence[FloatArray]) -> Flats:
        sizes = self._values.sizes
        return Flats(np.array(addresses, np.int64), sizes, arrays[0], lambda: [each.reshape(-1) for each in arrays])

    def _lacking(self) -> list[Copy]:
        """Returns every table's copy; none where workers hold different ones of some table."""
        copies = [t.downlink.copies.only for t in self.tables if isinstance(t.downlink, ModelDelta)]
        found = [copy for copy in copies if copy is not None]
        return found if len(found) == len(self.tables) else []
