"""Positions in blocks, and a small code with each, in an adaptive binary arithmetic code.

A block starts with its number of positions. A position is coded as the gap to the one before: the gap's high part in
unary, then as many low bits as the average gap has; the code's bits follow, the highest first. Every binary decision
has a 16-bit probability that moves by 1/32 towards the decision's outcome. For 64 of 4,096 random positions the code
takes 0.1 bits a position more than their entropy; positions of real gradients cluster and take less than that.

    interval [low, high] of 32-bit numbers; a decision with probability p/2**16 of being 1 cuts it at
    low + ((high − low)·p >> 16), and 1 takes the lower part; bytes in which low and high agree are written
    at the end the four bytes of low
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import FrameError
from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.jit import frozen, jit

_HALF, _RATE = 1 << 15, 5
_MOSTLY = 15 << 12
_ALL = (1 << 32) - 1

# Offsets of each kind of decision in the table of probabilities.
_FULL, _EMPTY, _UNARY = 0, 1, 2
_MOST_UNARY = 16  # later steps of a unary number share one
_NEAR = _UNARY + _MOST_UNARY  # low bits of a gap without a high part: a tree of the six highest
_NEAR_BITS = 6
_FAR = _NEAR + (1 << _NEAR_BITS)  # low bits of any other gap: a tree of the two highest
_FAR_BITS = 2
_CODE = _FAR + (1 << _FAR_BITS)

_MESSAGES = (
    "the coded positions end too early",
    "a position lies behind the last of its block",
    "another number of values is coded than the payload says",
)


class Blocks(NamedTuple):
    """The tiles of a matrix. A flat tensor is one row; its last tile may be short.

    Attributes:
        rows: of the matrix.
        columns: of the matrix.
        tile_rows: of a tile; divides `rows`.
        tile_columns: of a tile; divides `columns`, unless a tile is one row.
        k: number of values selected in a whole block.
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
        """The number of blocks."""
        return self.rows // self.tile_rows * -(-self.columns // self.tile_columns)


def encode_positions(
    counts: NDArray[np.int32], places: NDArray[np.int32], codes: Bytes, *, bits: int, blocks: Blocks
) -> Bytes:
    """Returns the coded positions and codes.

    Args:
        counts: the number of positions in every block.
        places: the positions within their blocks, ascending in each.
        codes: one for each position, of `bits` bits.
        bits: 1 … 8.
        blocks: of the tensor.

    Example:
        >>> blocks, places = Blocks(1, 8, 1, 4, 2, 4), np.array([0, 3, 1], np.int32)
        >>> coded = encode_positions(np.array([2, 1], np.int32), places, np.uint8([0, 1, 1]), bits=1, blocks=blocks)
        >>> positions, codes, nbytes = decode_positions(coded, 3, bits=1, blocks=blocks)
        >>> positions.tolist(), codes.tolist(), nbytes == coded.size
        ([0, 3, 5], [0, 1, 1], True)
    """
    room = 64 + blocks.number + 2 * places.size
    while True:
        out = np.empty(room, np.uint8)
        nbytes = _encode(frozen(counts), frozen(places), frozen(codes), bits, blocks, _probabilities(bits), out)
        if nbytes <= room:
            return out[:nbytes]
        room = nbytes


def decode_positions(
    data: Bytes | memoryview, count: int, *, bits: int, blocks: Blocks
) -> tuple[NDArray[np.int64], Bytes, int]:
    """Returns the positions in the tensor, ascending in each block; their codes; and their size in bytes.

    Args:
        data: the coded positions and codes; other bytes may follow.
        count: number of positions.
        bits: of a code.
        blocks: of the tensor.

    Raises:
        FrameError: no encoder writes these bytes.
    """
    positions, codes = np.empty(count, np.int64), np.empty(count, np.uint8)
    failed, nbytes = _decode(np.frombuffer(data, np.uint8), bits, blocks, _probabilities(bits), positions, codes)
    if failed:
        raise FrameError(f"{_MESSAGES[failed - 1]}: the payload is damaged")
    return positions, codes, nbytes


def _probabilities(bits: int) -> NDArray[np.int64]:
    made = np.full(_CODE + (1 << bits), _HALF)
    made[_FULL] = _MOSTLY
    return made


@jit
def _bit_length(number: int) -> int:
    length = 0
    while number >> length:
        length += 1
    return length


@jit
def _wanted(size: int, blocks: Any) -> Any:
    """Returns the number of values to select in a block of `size`, zeros included."""
    return (blocks.k * size + blocks.block - 1) // blocks.block


@jit
def _encode(counts: Any, places: Any, codes: Any, bits: int, blocks: Any, probabilities: Any, out: Any) -> int:
    """Returns the size of the code in bytes; bytes that do not fit into `out` are not written."""
    state = (0, _ALL, 0)
    index, at = 0, 0
    for _ in range(0, blocks.rows, blocks.tile_rows):
        for left in range(0, blocks.columns, blocks.tile_columns):
            size = blocks.tile_rows * min(blocks.tile_columns, blocks.columns - left)
            wanted, count = _wanted(size, blocks), counts[index]
            index += 1
            state = _write(state, out, probabilities, _FULL, count == wanted)
            if count < wanted:
                state = _write(state, out, probabilities, _EMPTY, count == 0)
                if count == 0:
                    continue
                state = _write_plain(state, out, count, _bit_length(wanted))
            low_bits = _bit_length(size // count) - 1
            free = 0
            for i in range(at, at + count):
                gap = places[i] - free
                free = places[i] + 1
                high = gap >> low_bits
                for step in range(high):
                    state = _write(state, out, probabilities, _UNARY + min(step, _MOST_UNARY - 1), True)
                state = _write(state, out, probabilities, _UNARY + min(high, _MOST_UNARY - 1), False)
                tree, modelled = (_FAR, min(_FAR_BITS, low_bits)) if high else (_NEAR, min(_NEAR_BITS, low_bits))
                low = gap - (high << low_bits)
                plain = low_bits - modelled
                state = _write_tree(state, out, probabilities, tree, low >> plain, modelled)
                state = _write_plain(state, out, low & ((1 << plain) - 1), plain)
                state = _write_tree(state, out, probabilities, _CODE, codes[i], bits)
            at += count
    low, _, nbytes = state
    for shift in (24, 16, 8, 0):
        if nbytes < out.size:
            out[nbytes] = low >> shift & 255
        nbytes += 1
    return nbytes


@jit
def _write(state: Any, out: Any, probabilities: Any, which: int, one: bool) -> Any:
    """Codes one decision; returns the new state: low, high, and the number of bytes written."""
    low, high, nbytes = state
    p = probabilities[which]
    middle = low + ((high - low) * p >> 16)
    if one:
        high = middle
        probabilities[which] = p + ((65536 - p) >> _RATE)
    else:
        low = middle + 1
        probabilities[which] = p - (p >> _RATE)
    return _settle(low, high, nbytes, out)


@jit
def _settle(low: int, high: int, nbytes: int, out: Any) -> Any:
    """Writes the bytes in which low and high agree."""
    while low >> 24 == high >> 24:
        if nbytes < out.size:
            out[nbytes] = high >> 24
        nbytes += 1
        low = low << 8 & _ALL
        high = high << 8 & _ALL | 255
    return low, high, nbytes


@jit
def _write_tree(state: Any, out: Any, probabilities: Any, tree: int, number: int, bits: int) -> Any:
    """Codes a number of `bits` bits, the highest first; each bit's probability depends on the bits before it."""
    node = 1
    for i in range(bits - 1, -1, -1):
        one = number >> i & 1
        state = _write(state, out, probabilities, tree + node, one == 1)
        node = 2 * node + one
    return state


@jit
def _write_plain(state: Any, out: Any, number: int, bits: int) -> Any:
    """Codes a number of `bits` bits, 0 and 1 equally likely."""
    low, high, nbytes = state
    for i in range(bits - 1, -1, -1):
        middle = low + ((high - low) >> 1)
        if number >> i & 1:
            high = middle
        else:
            low = middle + 1
        low, high, nbytes = _settle(low, high, nbytes, out)
    return low, high, nbytes


@jit
def _decode(data: Any, bits: int, blocks: Any, probabilities: Any, positions: Any, codes: Any) -> tuple[int, int]:
    """Returns the number of an error message (0: none), and the number of bytes read."""
    value, nbytes = 0, 4
    for i in range(4):
        value = value << 8 | (data[i] if i < data.size else 0)
    state = (0, _ALL, value, nbytes)
    at = 0
    for top in range(0, blocks.rows, blocks.tile_rows):
        for left in range(0, blocks.columns, blocks.tile_columns):
            size = blocks.tile_rows * min(blocks.tile_columns, blocks.columns - left)
            first = top * blocks.columns + left
            count = _wanted(size, blocks)
            state, full = _read(state, data, probabilities, _FULL)
            if not full:
                state, empty = _read(state, data, probabilities, _EMPTY)
                if empty:
                    continue
                wanted = count
                state, count = _read_plain(state, data, _bit_length(wanted))
                if not 0 < count < wanted:
                    return 3, 0
            if at + count > positions.size:
                return 3, 0
            low_bits = _bit_length(size // count) - 1
            place = -1
            for i in range(at, at + count):
                high, more = 0, 1
                while True:
                    state, more = _read(state, data, probabilities, _UNARY + min(high, _MOST_UNARY - 1))
                    if not more:
                        break
                    high += 1
                    if high << low_bits >= size:
                        return 2, 0
                tree, modelled = (_FAR, min(_FAR_BITS, low_bits)) if high else (_NEAR, min(_NEAR_BITS, low_bits))
                state, upper = _read_tree(state, data, probabilities, tree, modelled)
                state, lower = _read_plain(state, data, low_bits - modelled)
                place += 1 + (high << low_bits) + (upper << (low_bits - modelled)) + lower
                if place >= size:
                    return 2, 0
                row = place // blocks.tile_columns
                positions[i] = first + row * (blocks.columns - blocks.tile_columns) + place
                state, code = _read_tree(state, data, probabilities, _CODE, bits)
                codes[i] = code
            at += count
            if state[3] > data.size:
                return 1, 0
    if state[3] > data.size:
        return 1, 0
    return 0 if at == positions.size else 3, state[3]


@jit
def _read(state: Any, data: Any, probabilities: Any, which: int) -> Any:
    """Reads one decision; returns the new state (low, high, the number read, the number of bytes read) and 0 or 1."""
    low, high, value, nbytes = state
    p = probabilities[which]
    middle = low + ((high - low) * p >> 16)
    one = 0
    if value <= middle:
        one = 1
        high = middle
        probabilities[which] = p + ((65536 - p) >> _RATE)
    else:
        low = middle + 1
        probabilities[which] = p - (p >> _RATE)
    return _refill(low, high, value, nbytes, data), one


@jit
def _refill(low: int, high: int, value: int, nbytes: int, data: Any) -> Any:
    """Drops the bytes in which low and high agree, and reads as many; zeros follow the last byte."""
    while low >> 24 == high >> 24:
        low = low << 8 & _ALL
        high = high << 8 & _ALL | 255
        value = value << 8 & _ALL | (data[nbytes] if nbytes < data.size else 0)
        nbytes += 1
    return low, high, value, nbytes


@jit
def _read_tree(state: Any, data: Any, probabilities: Any, tree: int, bits: int) -> Any:
    node = 1
    for _ in range(bits):
        state, one = _read(state, data, probabilities, tree + node)
        node = 2 * node + one
    return state, node - (1 << bits)


@jit
def _read_plain(state: Any, data: Any, bits: int) -> Any:
    low, high, value, nbytes = state
    number = 0
    for _ in range(bits):
        middle = low + ((high - low) >> 1)
        number *= 2
        if value <= middle:
            number += 1
            high = middle
        else:
            low = middle + 1
        low, high, value, nbytes = _refill(low, high, value, nbytes, data)
    return (low, high, value, nbytes), number
