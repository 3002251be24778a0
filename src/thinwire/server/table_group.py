"""Tables that come in one message: their gradients are added, and their updates encoded, by few calls.

A call into a kernel costs more than the arithmetic of a small table, and a shard has dozens. What 3LC codes is checked,
decoded and encoded by one call for all tables, and what travels in a batch is added by one. Any other table goes alone.
The bits are the same either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.codecs import Codec
from thinwire.codecs.tensors import FloatArray
from thinwire.codecs.ternary_batch import TernaryFrames, takes_codec
from thinwire.kernels.numba.addresses import Addresses, add_to_many, scatter
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.packets.batch import rounded
from thinwire.policies.compression import NARROW
from thinwire.server.aggregation import Held
from thinwire.server.downlinks import Copy, ModelDelta
from thinwire.server.table import Table

Lacking = tuple[FloatArray, Copy]
"""See `ModelDelta.lacking`."""


MAX_GROUPS = 64
"""Tables come in a few combinations; groups of further ones are made anew."""


class TableGroups:
    """The tables of a shard, of which a message holds some.

    Args:
        tables: in the order of the plan.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._groups: dict[tuple[int, ...], TableGroup] = {}
        deltas = {index: t.downlink for index, t in enumerate(tables) if isinstance(t.downlink, ModelDelta)}
        self._up = _Ternary(tables, {index: table.codec for index, table in enumerate(tables)})
        self._down = _Ternary(tables, {index: downlink.codec for index, downlink in deltas.items()})
        self._vectors = {index for index, downlink in deltas.items() if downlink.is_batched}

    def of(self, indices: Sequence[int]) -> TableGroup:
        """Returns some of them together."""
        key = tuple(indices)
        if key not in self._groups:
            if len(self._groups) >= MAX_GROUPS:
                self._groups.clear()
            vectors = [place for place, index in enumerate(key) if index in self._vectors]
            tables = [self._tables[index] for index in key]
            self._groups[key] = TableGroup(tables, self._up.select(key), self._down.select(key), vectors)
        return self._groups[key]


class TableGroup:
    """Some tables of a shard.

    Args:
        tables: in the order of a message.
        up, down: those whose gradients, and whose updates, 3LC codes.
        vectors: the places of those whose updates travel in a batch.
    """

    def __init__(self, tables: Sequence[Table], up: _Selected, down: _Selected, vectors: Sequence[int]) -> None:
        self._tables, self._up, self._down, self._vectors = tables, up, down, vectors
        self._sizes = np.array([table.incoming.size for table in tables], np.int64)
        self._sums = _addresses(table.incoming.sum for table in tables)

    # ---- gradients

    def known(self, frames: Sequence[EncodedTensor]) -> list[bool]:
        """Says of each table's frame whether it is one that needs no further look; see `Table.hold`."""
        known = [False] * len(frames)
        if self._up.frames is not None:
            received = [b"" if isinstance(f := frames[place], BatchedTensor) else f for place in self._up.places]
            for place, right in zip(self._up.places, self._up.frames.check(received), strict=True):
                known[place] = right
        return known

    def add_due(self) -> None:
        """Adds what tables hold, as far as its turn has come. Raises FrameError as `Table.add` does."""
        while True:
            due = [table.incoming.next_due() for table in self._tables]
            if due.count(None) == len(due):
                return
            done = self._add_ternary(due) | self._add_vectors(due)
            for place, (table, gradient) in enumerate(zip(self._tables, due, strict=True)):
                if place in done:
                    table.incoming.added()
                elif gradient is not None:
                    with table.named_errors():
                        table.incoming.add_next(gradient)

    def _add_ternary(self, due: Sequence[Held | None]) -> set[int]:
        """Adds what one call can; returns the places of these tables."""
        up = self._up
        if up.frames is None:
            return set()
        received = [g if isinstance(g := due[place], bytes | memoryview) else b"" for place in up.places]
        begun = [self._tables[place].incoming.is_begun for place in up.places]
        done = up.frames.decode(received, self._sums[up.places], begun)
        return {place for place, nbytes in zip(up.places, done, strict=True) if nbytes}

    def _add_vectors(self, due: Sequence[Held | None]) -> set[int]:
        """Adds what came in batches; returns the places of these tables."""
        first: dict[int, FloatArray] = {}
        further: dict[int, FloatArray] = {}
        for place, gradient in enumerate(due):
            if isinstance(gradient, BatchedTensor) and gradient.fits(int(self._sizes[place])):
                (further if self._tables[place].incoming.is_begun else first)[place] = gradient.values
        for came, put in ((first, scatter), (further, add_to_many)):
            if came:
                places = list(came)
                put(np.concatenate(list(came.values())), self._sums[places], self._sizes[places])
        return {*first, *further}

    # ---- updates

    def encode(self, changed: Sequence[bool]) -> list[EncodedTensor | None]:
        """Encodes what all workers lack of some tables, and adds it to their copies.

        Args:
            changed: of each table, whether it is to be encoded.

        Returns:
            Each frame; None where the table's own method must make it, because it goes alone or cannot be encoded.
        """
        made: list[EncodedTensor | None] = [None] * len(self._tables)
        if all(changed):  # as it is but for tables that took no part in the step
            self._encode_ternary(made)
            self._encode_vectors(made)
        return made

    def _encode_ternary(self, made: list[EncodedTensor | None]) -> None:
        down = self._down
        if down.frames is None or (lacking := self._lacking(down.places)) is None:
            return
        bounds = [copy.lag for _, copy in lacking]
        multipliers = down.frames.multipliers(bounds) if any(bounds) else None
        values = _addresses(self._tables[place].downlink.values for place in down.places)
        bases = _addresses(base for base, _ in lacking)
        frames = down.frames.encode(values, _copies(lacking), multipliers, others=bases)
        if frames is not None:
            self._sent(down.places, lacking, frames, made)

    def _encode_vectors(self, made: list[EncodedTensor | None]) -> None:
        narrow = {self._tables[place].downlink.codec == NARROW for place in self._vectors}
        if len(narrow) != 1 or (lacking := self._lacking(self._vectors)) is None:
            return
        [rounds] = narrow
        values = np.concatenate([self._tables[place].downlink.values.reshape(-1) for place in self._vectors])
        values -= np.concatenate([base for base, _ in lacking])
        values = rounded(values) if rounds else values
        if np.isfinite(values).all():
            sizes = self._sizes[self._vectors]
            add_to_many(values, _copies(lacking), sizes)
            parts = np.split(values, np.cumsum(sizes)[:-1])
            self._sent(self._vectors, lacking, [BatchedTensor(part, rounds) for part in parts], made)

    def _lacking(self, places: Sequence[int]) -> list[Lacking] | None:
        found = []
        for place in places:
            downlink = self._tables[place].downlink
            if not isinstance(downlink, ModelDelta) or (lacking := downlink.lacking()) is None:
                return None
            found.append(lacking)
        return found

    def _sent(
        self,
        places: Sequence[int],
        lacking: Sequence[Lacking],
        frames: Sequence[EncodedTensor],
        made: list[EncodedTensor | None],
    ) -> None:
        for place, (_, copy), frame in zip(places, lacking, frames, strict=True):
            downlink, made[place] = self._tables[place].downlink, frame
            assert isinstance(downlink, ModelDelta)
            downlink.sent(copy)


def _addresses(arrays: Iterable[FloatArray]) -> Addresses:
    return np.array([each.ctypes.data for each in arrays], np.int64)


def _copies(lacking: Sequence[Lacking]) -> Addresses:
    return _addresses(copy.values for _, copy in lacking)


@dataclass(frozen=True, slots=True)
class _Selected:
    """Those of some tables that 3LC codes one way.

    Args:
        places: which of them.
        frames: of these; None where there are none.
    """

    places: Sequence[int]
    frames: TernaryFrames | None


class _Ternary:
    """Those of a shard's tables that 3LC codes one way.

    Args:
        tables: all of them.
        codecs: of that way, by index.
    """

    def __init__(self, tables: Sequence[Table], codecs: Mapping[int, Codec]) -> None:
        coded = [index for index, each in codecs.items() if tables[index].incoming.size and takes_codec(each)]
        self._rows = {index: row for row, index in enumerate(coded)}
        self._frames: TernaryFrames | None = None
        if coded:
            shapes = [tables[index].spec.shape for index in coded]
            self._frames = TernaryFrames([codecs[index] for index in coded], shapes)

    def select(self, indices: Sequence[int]) -> _Selected:
        places = [place for place, index in enumerate(indices) if index in self._rows]
        rows = [self._rows[indices[place]] for place in places]
        frames = self._frames.select(rows) if self._frames is not None and rows else None
        return _Selected(places, frames)
