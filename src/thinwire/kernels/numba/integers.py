"""Whole numbers in a fixed number of bits each, little-endian: value i takes bits i·width … (i + 1)·width − 1.

Bit 0 is the lowest bit of the first byte. Padding bits behind the last value are 0.

Eight values of `width` bits are `width` whole bytes, so groups of eight do not wait for one another: each is written
with a few overlapping 64-bit stores, and every value read with one load of its own. Only what is left at the end, where
such a store or load would reach past the buffer, goes value by value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import FrameError
from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.jit import frozen, jit, words_apart

MAX_WIDTH = 32
_NOTHING = np.zeros(16, np.uint8)  # stands in where there is no group of eight, so that kernels are compiled once


def packed_nbytes(size: int, width: int) -> int:
    """Bytes that `size` values of `width` bits take."""
    return -(-size * width // 8)


def pack_integers(
    values: NDArray[Any], *, offset: int = 0, shift: int = 0, width: int, words: NDArray[np.uint32]
) -> Bytes:
    """Packs values + offset, shifted right by `shift` bits, each then in 0 … 2**width − 1.

    Args:
        values: whole numbers of any type of at most 32 bits.
        offset: added first, so that signed numbers become unsigned.
        shift: low bits that are left out.
        width: bits a value, 1 … 32.
        words: uint32[ceil(n·width / 32)] or more; holds the result.

    Returns:
        A view of `words`: uint8[ceil(n·width / 8)].

    Example:
        >>> pack_integers(np.array([1, 2, 3, -4]), offset=4, width=3, words=np.empty(1, np.uint32)).tolist()
        [245, 1]
    """
    room = words.view(np.uint8)[: packed_nbytes(values.size, width)]
    num_groups = _num_groups(values.size, width)
    words_at = words_apart(room if num_groups else _NOTHING, 1)
    _pack(frozen(values), offset, np.uint64(shift), np.uint64(width), num_groups, words_at, words)
    return words.view(np.uint8)[: packed_nbytes(values.size, width)]


def unpack_integers(packed: Any, *, offset: int = 0, width: int, out: NDArray[Any]) -> int:
    """Fills `out` with the packed numbers minus `offset`; `packed` has ceil(n·width / 8) bytes.

    `out` is int32, or uint16 for numbers that fit; int32 holds the bits of 32-bit numbers.

    Returns:
        The largest number, minus `offset`; −offset for an empty `out`.

    Raises:
        FrameError: padding bits are set. The content of `out` is then undefined.
    """
    codes = frozen(np.frombuffer(packed, np.uint8))
    num_groups = _num_groups(out.size, width)
    words_at = words_apart(codes if num_groups else frozen(_NOTHING), 1)
    padded, largest = _unpack(codes, words_at, offset, np.uint64(width), num_groups, out)
    if padded:
        raise FrameError("padding bits behind the last value are set: the payload is damaged")
    return int(largest)


def _num_groups(size: int, width: int) -> int:
    """Groups of eight whose 64-bit stores and loads stay inside; a multiple of four, which ends on a 32-bit word."""
    return max(0, (size * width // 8 - 16) // width // 4 * 4)


@jit
def _pack(values: Any, offset: int, shift: Any, width: Any, num_groups: int, words_at: Any, words: Any) -> None:
    if width <= np.uint64(8):
        _pack_narrow(values, offset, shift, width, num_groups, words_at)
    else:
        _pack_wide(values, offset, shift, width, num_groups, words_at)
    held, filled, at = np.uint64(0), np.uint64(0), num_groups * np.int64(width) // 4
    for i in range(8 * num_groups, values.size):
        held |= (np.uint64(np.int64(values[i]) + offset) >> shift) << filled
        filled += width
        if filled >= np.uint64(32):
            words[at] = np.uint32(held & np.uint64(0xFFFFFFFF))
            held >>= np.uint64(32)
            filled -= np.uint64(32)
            at += 1
    if filled:
        words[at] = np.uint32(held)


@jit
def _pack_narrow(values: Any, offset: int, shift: Any, width: Any, num_groups: int, words_at: Any) -> None:
    """Eight values in one store."""
    for group in range(num_groups):
        i = 8 * group
        held = np.uint64(0)
        for place in range(8):
            held |= (np.uint64(np.int64(values[i + place]) + offset) >> shift) << (np.uint64(place) * width)
        words_at[group * np.int64(width)] = held


@jit
def _pack_wide(values: Any, offset: int, shift: Any, width: Any, num_groups: int, words_at: Any) -> None:
    """Two values in a store where the at most seven bits that the one before left over fit beside them, else one."""
    per_store = 2 if width <= np.uint64(28) else 1
    for group in range(num_groups):
        held, filled, at = np.uint64(0), np.uint64(0), np.uint64(group) * width
        for place in range(8 * group, 8 * group + 8, per_store):
            number = np.uint64(np.int64(values[place]) + offset) >> shift
            if per_store == 2:
                number |= (np.uint64(np.int64(values[place + 1]) + offset) >> shift) << width
            held |= number << filled
            filled += np.uint64(per_store) * width
            words_at[at] = held
            at += filled >> np.uint64(3)
            held >>= filled & ~np.uint64(7)
            filled &= np.uint64(7)


@jit
def _unpack(packed: Any, words_at: Any, offset: int, width: Any, num_groups: int, out: Any) -> Any:
    """Whether padding bits are set, and the largest number."""
    mask = (np.uint64(1) << width) - np.uint64(1)
    largest = np.int64(0)
    if width <= np.uint64(8):
        largest = _unpack_narrow(words_at, offset, width, mask, num_groups, out)
    else:
        largest = _unpack_wide(words_at, offset, width, mask, num_groups, out)
    held, filled, at = np.uint64(0), np.uint64(0), num_groups * np.int64(width)
    for i in range(8 * num_groups, out.size):
        while filled < width:
            held |= np.uint64(packed[at]) << filled
            filled += np.uint64(8)
            at += 1
        number = np.int64(held & mask)
        largest = max(largest, number)
        out[i] = np.int32(number - offset)
        held >>= width
        filled -= width
    return held != np.uint64(0), largest - offset


@jit
def _unpack_narrow(words_at: Any, offset: int, width: Any, mask: Any, num_groups: int, out: Any) -> Any:
    """Eight values of one load."""
    largest = np.int64(0)
    for group in range(num_groups):
        word = words_at[group * np.int64(width)]
        for place in range(8):
            number = np.int64((word >> (np.uint64(place) * width)) & mask)
            largest = max(largest, number)
            out[8 * group + place] = np.int32(number - offset)
    return largest


@jit
def _unpack_wide(words_at: Any, offset: int, width: Any, mask: Any, num_groups: int, out: Any) -> Any:
    three, seven = np.uint64(3), np.uint64(7)
    largest = np.int64(0)
    for group in range(num_groups):
        at = group * np.int64(width)
        for place in range(8):
            bit = np.uint64(place) * width
            number = np.int64((words_at[at + np.int64(bit >> three)] >> (bit & seven)) & mask)
            largest = max(largest, number)
            out[8 * group + place] = np.int32(number - offset)
    return largest
