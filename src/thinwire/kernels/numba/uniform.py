"""Counter-based random numbers: the number of value i under a key is a function of i and the key, nothing else.

A 32-bit counter goes through two published bijective mixers (Wellons' `lowbias32` and `triple32`), one word of the
key before the first and the other between them. Integer arithmetic only: every machine draws the same, and a decoder
that is told the key finds the encoder's choices again. The numbers repeat after 2**32 values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Key
from thinwire.kernels.numba.jit import jit


def high_bits(key: Key, first: int, out: NDArray[np.int32]) -> None:
    """Fills `out` with the 24 high bits of the draws first, first + 1, …"""
    fill_draws(*start_of(key, first), out)


def start_of(key: Key, first: int = 0) -> tuple[Any, Any]:
    """What `draw` and `fill_draws` take: the counter of value `first`, and the second word of the key.

    Example:
        >>> start_of((2**32 - 1, 7), first=3)
        (np.uint32(2), np.uint32(7))
    """
    return np.uint32((first + key[0]) & 0xFFFFFFFF), np.uint32(key[1])


@jit
def fill_draws(start: Any, key1: Any, out: Any) -> None:
    """Fills int32[n] with draws from counter `start` on."""
    for i in range(out.size):
        out[i] = draw(np.uint32(start + np.uint32(i)), key1)


@jit
def draw(counter: Any, key1: Any) -> Any:
    """The 24 high bits of one draw, int32. `triton.stochastic.draw` has the same lines."""
    x = np.uint32((counter ^ (counter >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    x = np.uint32(x ^ (x >> np.uint32(16)) ^ key1)
    x = np.uint32((x ^ (x >> np.uint32(17))) * np.uint32(0xED5AD4BB))
    x = np.uint32((x ^ (x >> np.uint32(11))) * np.uint32(0xAC4C1B51))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB))
    x = np.uint32(x ^ (x >> np.uint32(14)))
    return np.int32(x >> np.uint32(8))
