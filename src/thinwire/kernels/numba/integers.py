"""Whole numbers in a fixed number of bits each, little-endian: value i takes bits i·width … (i + 1)·width − 1.

Bit 0 is the lowest bit of the first byte. Padding bits behind the last value are 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import FrameError
from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.jit import frozen, jit, words_apart

MAX_WIDTH = 32
_SPARE = np.zeros(8, np.uint8)


def packed_nbytes(size: int, width: int) -> int:
    """Returns the bytes of `size` values of `width` bits."""
    return -(-size * width // 8)


def pack_integers(
    values: NDArray[Any], *, offset: int = 0, shift: int = 0, width: int, words: NDArray[np.uint32]
) -> Bytes:
    """Packs values + offset, shifted right by `shift` bits, each then in 0 … 2**width − 1.

    Args:
        values: whole numbers of any type of at most 32 bits.
        offset: added first, so that signed numbers become unsigned.
        shift: number of low bits to drop.
        width: bits a value, 1 … 32.
        words: uint32[ceil(n·width / 32)] or more; holds the result.

    Returns:
        A view of `words`: uint8[ceil(n·width / 8)].

    Example:
        >>> pack_integers(np.array([1, 2, 3, -4]), offset=4, width=3, words=np.empty(1, np.uint32)).tolist()
        [245, 1]
    """
    _pack(frozen(values), offset, np.uint64(shift), np.uint64(width), words)
    return words.view(np.uint8)[: packed_nbytes(values.size, width)]


def unpack_integers(packed: Any, *, offset: int = 0, width: int, out: NDArray[Any]) -> int:
    """Fills `out` with the packed numbers minus `offset`; `packed` has ceil(n·width / 8) bytes.

    `out` is int32, or uint16 for numbers that fit; int32 holds the bits of 32-bit numbers.

    Returns:
        The largest number, minus `offset`; −offset for an empty `out`.

    Raises:
        FrameError: padding bits are set.
    """
    codes, num_bits = np.frombuffer(packed, np.uint8), out.size * width
    if num_bits % 8 and codes[-1] >> num_bits % 8:
        raise FrameError("padding bits behind the last value are set: the payload is damaged")
    words = words_apart(np.concatenate((codes, _SPARE)), 1)
    return int(_unpack(frozen(words), offset, np.uint64(width), out))


@jit
def _pack(values: Any, offset: int, shift: Any, width: Any, words: Any) -> None:
    held, filled, at = np.uint64(0), np.uint64(0), 0
    for i in range(values.size):
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
def _unpack(words: Any, offset: int, width: Any, out: Any) -> Any:
    """Returns the largest number, minus the offset."""
    mask, largest = (np.uint64(1) << width) - np.uint64(1), np.int64(0)
    for i in range(out.size):
        bit = np.uint64(i) * width
        number = np.int64((words[bit >> np.uint64(3)] >> (bit & np.uint64(7))) & mask)
        largest = max(largest, number)
        out[i] = np.int32(number - offset)
    return largest - offset
