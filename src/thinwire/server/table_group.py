"""Tables that come in one message: their gradients are added, and their updates encoded, by few calls.

A call into a kernel costs more than the arithmetic of a small table, and a shard has dozens. What 3LC codes is checked,
decoded and encoded by one call for all tables, and what travels in a batch is added by one. Any other table goes alone.
The bits are the same either way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from thinwire.codecs import Codec
from thinwire.codecs.tensors import FloatArray
from thinwire.codecs.ternary_frames import TernaryFrames, takes_codec
from thinwire.kernels.numba.addresses import Addresses, add_to_many, scatter
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.packets.batch import rounded
from thinwire.policies.compression import NARROW
from thinwire.server.copies import Copy
from thinwire.server.downlinks import ModelDelta
from thinwire.server.table import Held, Table

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
        self.up = Ternary(tables, {index: table.codec for index, table in enumerate(tables)})
        deltas = {index: t.downlink for index, t in enumerate(tables) if isinstance(t.downlink, ModelDelta)}
        self.down = Ternary(tables, {index: downlink.codec for index, downlink in deltas.items()})

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
    def _up(self) -> Selected:
        return self._groups.up.select(self.indices)

    @cached_property
    def _down(self) -> Selected:
        return self._groups.down.select(self.indices)

    @cached_property
    def _vectors(self) -> list[int]:
        """The places of those whose updates travel in a batch."""
        deltas = ((place, table.downlink) for place, table in enumerate(self.tables))
        return [place for place, each in deltas if isinstance(each, ModelDelta) and each.is_batched]

    @cached_property
    def _sizes(self) -> Addresses:
        return np.array([table.sum.size for table in self.tables], np.int64)

    @cached_property
    def _sums(self) -> Addresses:
        return _addresses(table.sum for table in self.tables)

    @cached_property
    def _values(self) -> Addresses:
        return _addresses(table.downlink.values for table in self.tables)

    # ---- gradients

    def look(self, frames: Sequence[EncodedTensor]) -> tuple[list[Held | None], set[int]]:
        """Checks what came for each table.

        Returns:
            What is to be added, and the indices of the tables whose frame says that it is not finite.

        Raises:
            ProtocolError: as `Table.look` does.
        """
        known: set[int] = set()
        if self._up.frames is not None:
            received = [b"" if isinstance(f := frames[place], BatchedTensor) else f for place in self._up.places]
            right = zip(self._up.places, self._up.frames.check(received), strict=True)
            known = {place for place, each in right if each}
        held: list[Held | None] = list(frames)
        refused = set()
        for place, table in enumerate(self.tables):
            if place not in known:
                held[place], finite = table.look(frames[place])
                if not finite:
                    refused.add(self.indices[place])
        return held, refused

    def add(self, rank: int, gradients: Sequence[Held | None], *, but: Collection[int] = ()) -> None:
        """Adds one worker's gradients, which `look` has returned, to the sums.

        Args:
            rank: whose, for the error.
            gradients: one for each table.
            but: indices of tables that are left out.

        Raises:
            FrameError: a payload is damaged; the table's sum is what it was, those of others may have changed.
        """
        if but:
            pairs = zip(self.indices, gradients, strict=True)
            gradients = [None if index in but else gradient for index, gradient in pairs]
        begun = [table.aggregate.contributions[0] > 0 for table in self.tables]
        done = self._add_ternary(gradients, begun) | self._add_vectors(gradients, begun)
        for place, (table, gradient) in enumerate(zip(self.tables, gradients, strict=True)):
            if place in done:
                table.aggregate.contributions[0] += 1
            elif gradient is not None:
                table.add(rank, gradient)

    def _add_ternary(self, gradients: Sequence[Held | None], begun: Sequence[bool]) -> set[int]:
        """Adds what one call can; returns the places of these tables."""
        up = self._up
        if up.frames is None:
            return set()
        received = [g if isinstance(g := gradients[place], bytes | memoryview) else b"" for place in up.places]
        done = up.frames.decode(received, self._sums[up.places], [begun[place] for place in up.places])
        return {place for place, nbytes in zip(up.places, done, strict=True) if nbytes}

    def _add_vectors(self, gradients: Sequence[Held | None], begun: Sequence[bool]) -> set[int]:
        """Adds what came in batches; returns the places of these tables."""
        came = {place: each.values for place, each in enumerate(gradients) if isinstance(each, BatchedTensor)}
        first = [place for place in came if not begun[place]]
        further = [place for place in came if begun[place]]
        for places, put in ((first, scatter), (further, add_to_many)):
            if places:
                put(np.concatenate([came[place] for place in places]), self._sums[places], self._sizes[places])
        return set(came)

    def take(self) -> list[FloatArray | None]:
        """Ends the sums, which the next ones overwrite; returns every aggregate, None where nobody had a gradient."""
        found: list[FloatArray | None] = []
        for table in self.tables:
            given, table.aggregate.contributions[0] = table.aggregate.contributions[0], 0
            table.downlink.senders = given or table.downlink.senders
            if given and table.reduce != "sum":
                table.aggregate.average(given)
            found.append(table.sum if given else None)
        return found

    # ---- updates

    def encode(self, changed: Sequence[bool]) -> list[EncodedTensor | None]:
        """Encodes what all workers lack of some tables, and adds it to their copies.

        Args:
            changed: of each table, whether it is to be encoded.

        Returns:
            Each frame; None where the table's own method must make it, because it goes alone or cannot be encoded.
        """
        made: list[EncodedTensor | None] = [None] * len(self.tables)
        if all(changed):  # as it is but for tables that took no part in the step
            self._encode_ternary(made)
            self._encode_vectors(made)
        return made

    def _encode_ternary(self, made: list[EncodedTensor | None]) -> None:
        down = self._down
        if down.frames is None or (lacking := self._lacking(down.places)) is None:
            return
        bounds = [copy.lag for copy in lacking]
        multipliers = down.frames.multipliers(bounds) if any(bounds) else None
        copies, bases = _copies(lacking), np.array([copy.base_address for copy in lacking], np.int64)
        frames = down.frames.encode(self._values[down.places], copies, multipliers, others=bases)
        if frames is not None:
            self._sent(down.places, lacking, frames, made)

    def _encode_vectors(self, made: list[EncodedTensor | None]) -> None:
        narrow = {self.tables[place].downlink.codec == NARROW for place in self._vectors}
        if len(narrow) != 1 or (lacking := self._lacking(self._vectors)) is None:
            return
        [rounds] = narrow
        values = np.concatenate([self.tables[place].downlink.values.reshape(-1) for place in self._vectors])
        values -= np.concatenate([copy.base.reshape(-1) for copy in lacking])
        values = rounded(values) if rounds else values
        if np.isfinite(values).all():
            sizes = self._sizes[self._vectors]
            add_to_many(values, _copies(lacking), sizes)
            parts = np.split(values, np.cumsum(sizes)[:-1])
            self._sent(self._vectors, lacking, [BatchedTensor(part, rounds) for part in parts], made)

    def _lacking(self, places: Sequence[int]) -> list[Copy] | None:
        found = []
        for place in places:
            downlink = self.tables[place].downlink
            if not isinstance(downlink, ModelDelta) or (copy := downlink.copies.only) is None:
                return None
            found.append(copy)
        return found

    def _sent(
        self,
        places: Sequence[int],
        lacking: Sequence[Copy],
        frames: Sequence[EncodedTensor],
        made: list[EncodedTensor | None],
    ) -> None:
        for place, copy, frame in zip(places, lacking, frames, strict=True):
            downlink, made[place] = self.tables[place].downlink, frame
            assert isinstance(downlink, ModelDelta)
            downlink.sent(copy)


def _addresses(arrays: Iterable[FloatArray]) -> Addresses:
    return np.array([each.ctypes.data for each in arrays], np.int64)


def _copies(lacking: Sequence[Copy]) -> Addresses:
    return np.array([copy.address for copy in lacking], np.int64)


@dataclass(frozen=True, slots=True)
class Selected:
    """Those of some tables that 3LC codes one way.

    Args:
        places: which of them.
        frames: of these; None where there are none.
    """

    places: Sequence[int]
    frames: TernaryFrames | None


class Ternary:
    """Those of a shard's tables that 3LC codes one way.

    Args:
        tables: all of them.
        codecs: of that way, by index.
    """

    def __init__(self, tables: Sequence[Table], codecs: Mapping[int, Codec]) -> None:
        coded = [index for index, each in codecs.items() if tables[index].sum.size and takes_codec(each)]
        self._rows = {index: row for row, index in enumerate(coded)}
        self._frames: TernaryFrames | None = None
        if coded:
            shapes = [tables[index].spec.shape for index in coded]
            self._frames = TernaryFrames([codecs[index] for index in coded], shapes)

    def select(self, indices: Sequence[int]) -> Selected:
        places = [place for place, index in enumerate(indices) if index in self._rows]
        rows = [self._rows[indices[place]] for place in places]
        frames = self._frames.select(rows) if self._frames is not None and rows else None
        return Selected(places, frames)
