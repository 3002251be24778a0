"""A tensor cut into blocks, and the k largest magnitudes of each (`largest.py` finds those of one).

Blocks are tiles of a matrix, or stretches of neighbouring values. Positions inside a block count along its rows, so
that a block is read as if it were flat.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.numba.jit import frozen, jit, magnitude_bits, wide_vectors
from thinwire.kernels.numba.largest import room_to_select, select_largest


class Blocks(NamedTuple):
    """How a tensor is cut into blocks: a matrix into tiles. A flat tensor is one row, whose last tile may be short.

    Attributes:
        rows: of the matrix.
        columns: likewise.
        tile_rows: of a tile; divides `rows`.
        tile_columns: of a tile; divides `columns`, unless a tile is one row.
        k: how many values of a whole block are selected.
        block: values of a whole block; of a smaller tile k/block of its values are selected, rounded up.

    Example:
        >>> Blocks(1, 10_000, 1, 4096, 64, 4096).number, Blocks(128, 192, 64, 64, 64, 4096).number
        (3, 6)
    """

    rows: int
    columns: int
    tile_rows: int
    tile_columns: int
    k: int
    block: int

    @property
    def number(self) -> int:
        """How many blocks there are."""
        return self.rows // self.tile_rows * -(-self.columns // self.tile_columns)


class Selected(NamedTuple):
    """What was selected, block after block and in each by ascending position."""

    counts: NDArray[np.int32]
    """Of every block, how many values."""
    places: NDArray[np.int32]
    """Their positions in the block."""
    values: NDArray[Any]

    def first(self, number: int) -> Selected:
        """The first so many values."""
        return Selected(self.counts, self.places[:number], self.values[:number])


def select_blocks(values: Any, blocks: Blocks, *, residual: Any = None, residual_scale: float = 1.0) -> Selected:
    """The k largest magnitudes of every block; of equal ones the lower position. Zeros are left out.

    Args:
        values: float32[n] or float64[n], finite.
        blocks: of n values.
        residual: of the same type and size; becomes v = residual_scale·residual + values, of which is selected.
        residual_scale: what the residual is multiplied by first.

    Example:
        >>> v = np.array([3, -3, 1, 2, 0, 0, 0, -1], np.float32)
        >>> found = select_blocks(v, Blocks(1, 8, 1, 4, 2, 4))
        >>> found.counts.tolist(), found.places.tolist(), found.values.tolist()
        ([2, 1], [0, 1, 3], [3.0, -3.0, -1.0])
    """
    selected = room_for(blocks, values.dtype)
    total = _select(
        frozen(values),
        residual,
        values.dtype.type(residual_scale),
        blocks,
        *room_to_select(blocks.tile_rows * blocks.tile_columns, values.dtype),
        *selected,
    )
    return selected.first(total)


def room_for(blocks: Blocks, dtype: Any) -> Selected:
    """Memory for as much as may be selected of a tensor, and one value more."""
    size = blocks.rows * blocks.columns
    room = min(size, -(-size * blocks.k // blocks.block) + blocks.number) + 1
    return Selected(np.empty(blocks.number, np.int32), np.empty(room, np.int32), np.empty(room, dtype))


def take_from(residual: Any, blocks: Blocks, selected: Selected, codes: Any, book: Any) -> None:
    """Takes what was sent of the selected values off the residual, which holds them."""
    _take(residual, blocks, selected.counts, selected.places, selected.values, codes, book)


def positions_of(selected: Selected, blocks: Blocks) -> NDArray[np.int64]:
    """Returns where in the tensor the selected values lie.

    Example:
        >>> one_each = Selected(np.ones(2, np.int32), np.array([1, 2], np.int32), np.ones(2))
        >>> positions_of(one_each, Blocks(2, 4, 2, 2, 1, 4)).tolist()
        [1, 6]
    """
    tops, lefts = np.divmod(np.repeat(np.arange(blocks.number), selected.counts), blocks.columns // blocks.tile_columns)
    rows, columns = np.divmod(selected.places, blocks.tile_columns)
    found: NDArray[np.int64] = (tops * blocks.tile_rows + rows) * blocks.columns + lefts * blocks.tile_columns + columns
    return found


def put(out: Any, positions: NDArray[np.int64], codes: Any, book: Any, accumulate: bool) -> None:
    """Writes (or adds) ``book[codes]`` at the positions of `out`; those it overwrites the rest with zeros."""
    if not accumulate:
        out.fill(0)
    _put(out, positions, codes, book, accumulate)


@jit
def _select(
    values: Any,
    residual: Any,
    scale: Any,
    blocks: Any,
    held: Any,
    bits: Any,
    histogram: Any,
    found: Any,
    flags: Any,
    counts: Any,
    places: Any,
    sent: Any,
) -> int:
    rows, columns, tile_rows, tile_columns, k, block = blocks
    total, index, least = 0, 0, bits.dtype.type(0)
    for top in range(0, rows, tile_rows):
        for left in range(0, columns, tile_columns):
            width = min(tile_columns, columns - left)
            size = tile_rows * width
            for row in range(tile_rows):
                first = (top + row) * columns + left
                kept = None if residual is None else residual[first : first + width]
                start, stop = row * width, row * width + width
                _load(values[first : first + width], kept, scale, held[start:stop], bits[0, start:stop])
            wanted = (k * size + block - 1) // block
            counts[index], least = select_largest(
                held, bits, size, wanted, least, histogram, found, flags, places[total:], sent[total:]
            )
            total += counts[index]
            index += 1
    return total


@jit
def _load(values: Any, residual: Any, scale: Any, held: Any, bits: Any) -> None:
    wide_vectors()
    for i in range(values.size):
        v = values[i] if residual is None else scale * residual[i] + values[i]
        if residual is not None:
            residual[i] = v
        held[i] = v
        bits[i] = magnitude_bits(v)


@jit
def _take(residual: Any, blocks: Any, counts: Any, places: Any, values: Any, codes: Any, book: Any) -> None:
    at, index = 0, 0
    for top in range(0, blocks.rows, blocks.tile_rows):
        for left in range(0, blocks.columns, blocks.tile_columns):
            first = top * blocks.columns + left
            for _ in range(counts[index]):
                residual[position_of(places[at], first, blocks)] = values[at] - book[codes[at]]
                at += 1
            index += 1


@jit
def position_of(place: int, first: int, blocks: Any) -> Any:
    """In a kernel: where in the tensor a place of the block lies that begins at `first`."""
    if blocks.tile_rows == 1:
        return first + place
    row = place // blocks.tile_columns
    return first + row * blocks.columns + place - row * blocks.tile_columns


@jit
def _put(out: Any, positions: Any, codes: Any, book: Any, accumulate: bool) -> None:
    for i in range(positions.size):
        at = positions[i]
        out[at] = out[at] + book[codes[i]] if accumulate else book[codes[i]]
