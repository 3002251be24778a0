"""The k largest magnitudes of every block of a tensor, and their rounding to a few levels.

A tensor is cut into blocks: tiles of a matrix, or stretches of neighbouring values. In each the k-th largest magnitude
is found by a radix selection on the bits (histograms of eleven bits at a time, of fewer and fewer candidates, until few
are left), without sorting. Positions inside a block count along its rows, so that a block is read as if it were flat.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.numba.jit import frozen, jit, magnitude_bits, wide_vectors

_BINS = 1 << 11  # of a histogram: eleven bits of the magnitudes at a time
_FEW = 64  # so many are compared with each other: quicker than another histogram


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
        *room_to_select(blocks, values.dtype),
        *selected,
    )
    return selected.first(total)


def room_for(blocks: Blocks, dtype: Any) -> Selected:
    """Memory for as much as may be selected of a tensor, and one value more."""
    size = blocks.rows * blocks.columns
    room = min(size, -(-size * blocks.k // blocks.block) + blocks.number) + 1
    return Selected(np.empty(blocks.number, np.int32), np.empty(room, np.int32), np.empty(room, dtype))


def room_to_select(blocks: Blocks, dtype: Any) -> tuple[Any, ...]:
    """Memory to work in: a block's values, its magnitudes' bits, a histogram, candidates and marks of them."""
    whole = blocks.tile_rows * blocks.tile_columns
    bits = np.empty((3, whole), np.int32 if np.dtype(dtype).itemsize == 4 else np.int64)
    marks = np.empty(-(-whole // 8) * 8, np.uint8)
    return np.empty(whole, dtype), bits, np.empty(_BINS, np.int32), np.empty(whole, np.int32), marks


def round_to_bins(values: Any, bits: int, codes: NDArray[np.uint8]) -> NDArray[Any]:
    """Fills `codes` with the bin of each value, of 2**bits; returns what each bin decodes to, the mean of its members.

    With 2 bits and more: c = v − mean, σ the standard deviation, and bins of 6σ/2**bits of which bin 2**(bits − 1) has
    its middle at the mean; the outer ones take what lies beyond. With 1 bit the two bins meet at the mean. Where there
    are no more values than bins, each has its own.

    Args:
        values: float32[n] or float64[n], finite.
        bits: 1 … 8.
        codes: uint8[n].

    Example:
        >>> codes = np.empty(5, np.uint8)
        >>> round_to_bins(np.array([1.0, -1.0, 1.5, -1.0, -2.0], np.float32), 2, codes).tolist(), codes.tolist()
        ([0.0, -2.0, -1.0, 1.25], [3, 2, 3, 2, 1])
    """
    num_bins, kind = 1 << bits, values.dtype.type
    if values.size <= num_bins:
        codes[:] = np.arange(values.size)
        exact = np.zeros(num_bins, kind)
        exact[: values.size] = values
        return exact
    book, unit = np.zeros((2, num_bins)), 1.0
    if kind is np.float64:  # whose squares may overflow
        unit = 2.0 ** min(max(math.frexp(float(np.abs(values).max()))[1], -1000), 1000)
    _round(frozen(values), 1.0 / unit, codes, book[0], book[1])
    most = float(np.finfo(kind).max)
    levels: NDArray[Any] = np.clip(book[0] * unit, -most, most).astype(kind)
    return levels


def take_from(residual: Any, blocks: Blocks, selected: Selected, codes: Any, book: Any) -> None:
    """Takes what was sent of the selected values off the residual, which holds them."""
    _take(residual, blocks, selected.counts, selected.places, selected.values, codes, book)


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
def select_largest(
    held: Any,
    bits: Any,
    size: int,
    wanted: int,
    least: Any,
    histogram: Any,
    found: Any,
    flags: Any,
    places: Any,
    sent: Any,
) -> tuple[Any, Any]:
    """Selects from one block; returns how many it selected, and a magnitude that all of them reach.

    Args:
        held: the block's values.
        bits: of their magnitudes, in its first row.
        size: how many there are.
        wanted: how many to select.
        least: the magnitude that it returned of the block before.
        histogram, found, flags: memory to work in.
        places, sent: to fill from the beginning; one more may be written.
    """
    floor = _floor(bits[0, :size], wanted, least)
    num_candidates = _candidates(bits[0, :size], floor, flags, flags.view(np.uint64), found, bits[1])
    least, ties = _threshold(bits[1, :num_candidates], wanted, histogram, bits[2])
    count = 0
    for i in range(num_candidates):
        place, magnitude = found[i], bits[1, i]
        places[count] = place
        sent[count] = held[place]
        equal = magnitude == least and ties > 0
        ties -= equal
        count += (magnitude > least) | equal
    return count, least


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
def _floor(bits: Any, wanted: int, last: Any) -> Any:
    """A magnitude that `wanted` or more reach, a few more where this block is like the last; 1 where too few do."""
    step = 1 << (19 if bits.itemsize == 4 else 48)  # a sixteenth of an octave: another count is quick, a candidate not
    floor = np.int64(last) - step
    while floor > 1 and _count_from(bits, bits.dtype.type(floor)) < wanted:
        step *= 2
        floor -= step
    return bits.dtype.type(max(floor, 1))


@jit
def _count_from(bits: Any, floor: Any) -> Any:
    wide_vectors()
    count = np.int32(0)
    for i in range(bits.size):
        count = np.int32(count + np.int32(bits[i] >= floor))
    return count


@jit
def _candidates(bits: Any, floor: Any, flags: Any, words: Any, found: Any, magnitudes: Any) -> int:
    """The places and magnitudes that reach the floor; returns how many there are."""
    _flag(bits, floor, flags)
    count = 0
    for i in range((bits.size + 7) // 8):
        if words[i]:
            for place in range(8 * i, 8 * i + 8):
                if flags[place]:
                    found[count] = place
                    magnitudes[count] = bits[place]
                    count += 1
    return count


@jit
def _flag(bits: Any, floor: Any, flags: Any) -> None:
    wide_vectors()
    for i in range(bits.size):
        flags[i] = np.uint8(bits[i] >= floor)
    flags[bits.size : (bits.size + 7) // 8 * 8] = 0


@jit
def _threshold(bits: Any, wanted: int, histogram: Any, room: Any) -> tuple[Any, int]:
    """Returns (least, ties): the largest are those above `least`, and the first `ties` of those equal to it."""
    if bits.size <= wanted:
        return bits.dtype.type(0), 0
    candidates, size = bits, bits.size
    shift = 8 * bits.itemsize - 12
    while size > _FEW:
        histogram[:] = 0
        place = 0
        for i in range(size):
            each = (candidates[i] >> shift) & (_BINS - 1)
            histogram[each] += 1
            place = max(place, each)
        while histogram[place] < wanted:
            wanted -= histogram[place]
            place -= 1
        found = 0
        for i in range(size):
            magnitude = candidates[i]
            room[found] = magnitude
            found += ((magnitude >> shift) & (_BINS - 1)) == place
        candidates, size = room, found
        lowest = (room[0] >> shift) << shift
        if size == wanted:  # all of them, down to the lowest of this bin
            return bits.dtype.type(lowest - 1), 0
        if shift == 0:
            return bits.dtype.type(lowest), wanted
        shift = max(shift - 11, 0)
    least, ties = _of_few(candidates[:size], wanted)
    return least, ties


@jit
def _of_few(bits: Any, wanted: int) -> tuple[Any, int]:
    """`_threshold` of a few numbers: for each, how many are above it, and how many equal."""
    for i in range(bits.size):
        above = _count_from(bits, bits[i] + 1)
        if above < wanted <= _count_from(bits, bits[i]):
            return bits[i], wanted - above
    return bits.dtype.type(0), 0


@jit
def _round(values: Any, lift: float, codes: Any, means: Any, members: Any) -> None:
    """`round_to_bins`, in units of which `lift` is the inverse; all sums from the first value to the last."""
    mean = 0.0
    for i in range(values.size):
        mean += values[i] * lift
    mean /= values.size
    squares = 0.0
    for i in range(values.size):
        squares += (values[i] * lift - mean) ** 2
    num_bins = means.size
    width = 6 * math.sqrt(squares / (values.size - 1)) / num_bins
    for i in range(values.size):
        v = values[i] * lift
        if num_bins == 2:
            code = 1 if v >= mean else 0
        elif width > 0:
            code = int(min(max(math.floor((v - mean) / width + (num_bins / 2 + 0.5)), 0.0), num_bins - 1.0))
        else:
            code = num_bins // 2
        codes[i] = code
        means[code] += v
        members[code] += 1
    for code in range(num_bins):
        if members[code] > 0:
            means[code] /= members[code]


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
