"""Counter-based random numbers: the number of value i under a key is a function of i and the key, nothing else.

A 32-bit counter goes through two published bijective mixers (Wellons' `lowbias32` and `triple32`), one word of the
key before the first and the other between them. Integer arithmetic only: every machine draws the same, and a decoder
that is told the key finds the encoder's choices again. The numbers repeat after 2**32 values.

`draws` is the plain NumPy form. Kernels that draw in their own loops hold a copy of the same lines, because a cached
kernel may only call kernels of its own file; tests compare them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.numba.jit import jit

Key = tuple[int, int]
"""Two 32-bit words."""

UNIT = 2.0**-24
"""Uniform numbers are multiples of it: the 24 high bits of a draw, exact in float32."""


def draws(key: Key, size: int, first: int = 0) -> NDArray[np.uint32]:
    """Returns uint32[size]: the draws of values first, first + 1, …

    Example:
        >>> bool((draws((1, 2), 5, first=3) == draws((1, 2), 8)[3:]).all())
        True
    """
    x = (np.arange(first, first + size, dtype=np.int64) + key[0]).astype(np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    x = x ^ (x >> np.uint32(16)) ^ np.uint32(key[1])
    x = (x ^ (x >> np.uint32(17))) * np.uint32(0xED5AD4BB)
    x = (x ^ (x >> np.uint32(11))) * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB)
    mixed: NDArray[np.uint32] = x ^ (x >> np.uint32(14))
    return mixed


def uniforms(key: Key, size: int) -> NDArray[np.float32]:
    """Returns float32[size] in [0, 1), multiples of 2**-24."""
    return (draws(key, size) >> np.uint32(8)).astype(np.float32) * np.float32(UNIT)


def high_bits(key: Key, first: int, out: NDArray[np.int32]) -> None:
    """Fills `out` with the 24 high bits of the draws first, first + 1, …"""
    _fill(np.uint32((first + key[0]) & 0xFFFFFFFF), np.uint32(key[1]), out)


@jit
def _fill(start: Any, key1: Any, out: Any) -> None:
    for i in range(out.size):
        x = np.uint32(start + np.uint32(i))
        x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
        x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
        x = np.uint32(x ^ (x >> np.uint32(16)) ^ key1)
        x = np.uint32((x ^ (x >> np.uint32(17))) * np.uint32(0xED5AD4BB))
        x = np.uint32((x ^ (x >> np.uint32(11))) * np.uint32(0xAC4C1B51))
        x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB))
        x = np.uint32(x ^ (x >> np.uint32(14)))
        out[i] = np.int32(x >> np.uint32(8))
