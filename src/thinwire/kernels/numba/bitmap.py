"""Flags and positions as one bit each, the first in the highest bit of the first byte, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.jit import frozen, jit, wide_vectors

_GATHER, _56 = np.uint64(0x8040201008040201), np.uint64(56)


def set_bits(positions: NDArray[np.int64], bitmap: Bytes) -> None:
    """Clears `bitmap` and sets the bits of the positions.

    Example:
        >>> bitmap = np.empty(2, np.uint8)
        >>> set_bits(np.array([1, 3]), bitmap)
        >>> bitmap.tolist(), positions_of(bitmap).tolist()
        ([80, 0], [1, 3])
    """
    bitmap.fill(0)
    _set(frozen(positions), bitmap)


def positions_of(bitmap: Bytes) -> NDArray[np.int64]:
    """The positions of the bits that are set, ascending."""
    count = int(np.bitwise_count(bitmap).sum())
    positions = np.empty(count + 1, np.int64)
    _positions(frozen(bitmap), positions)
    return positions[:count]


@jit
def gather(flags: Any, words: Any, known: int, bits: Any) -> None:
    """In a kernel: eight flags, read as one of `words`, to a byte by one multiplication.

    Args:
        flags: uint8, 0 or 1 each; those behind the first `known` are cleared.
        words: the same memory as uint64.
        bits: uint8[ceil(known / 8)], filled.
    """
    wide_vectors()
    flags[known : 8 * bits.size] = 0
    for i in range(bits.size):
        bits[i] = np.uint8((words[i] * _GATHER) >> _56)


@jit
def _set(positions: Any, bitmap: Any) -> None:
    for i in range(positions.size):
        position = positions[i]
        bitmap[position >> 3] |= np.uint8(128 >> (position & 7))


@jit
def _positions(bitmap: Any, positions: Any) -> None:
    """In a byte that is not zero every position is written, and kept where it counts. One slot is spare."""
    at: Any = 0
    for i in range(bitmap.size):
        byte = np.int64(bitmap[i])
        if byte:
            for j in range(8):
                positions[at] = 8 * i + j
                at += byte >> (7 - j) & 1
