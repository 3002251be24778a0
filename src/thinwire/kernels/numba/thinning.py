"""Values kept by chance: which of n values a key keeps, collected for sending and put back in their places.

The random numbers are those of `kernels.numba.uniform` (the same lines, because a cached kernel calls none of another
file; tests compare). A block of them is drawn in vector code; then every value is written and the position moves on
only where it is kept, which leaves nothing to mispredict.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Floats
from thinwire.kernels.numba.jit import jit
from thinwire.kernels.numba.magnitude import frozen
from thinwire.kernels.numba.uniform import Key

_BLOCK = 1 << 12


def collect_kept(values: Floats, *, key: Key, kept: int, factor: Any, sent: Floats) -> int:
    """Fills `sent` with factor·v of the values whose 24 random bits are below `kept`, in order; returns how many.

    Where they are not fewer than `sent` has room for, its content is undefined: call again with more.

    Args:
        values: float32[n] or float64[n].
        key: of the random numbers.
        kept: the probability in units of 2**-24.
        factor: what values are multiplied by, in their type.
        sent: of their type; n + 1 is always enough.

    Example:
        >>> sent = np.empty(4, np.float32)
        >>> collect_kept(np.array([1, 2, 3], np.float32), key=(1, 2), kept=1 << 24, factor=np.float32(2), sent=sent)
        3
        >>> sent[:3].tolist()
        [2.0, 4.0, 6.0]
    """
    start, key1 = _words(key)
    return int(_collect(frozen(values), start, key1, np.int32(kept), factor, np.empty(_BLOCK, np.int32), sent))


def kept_positions(size: int, *, key: Key, kept: int, positions: NDArray[Any]) -> int:
    """How many of `size` values are kept; their positions, ascending, are in `positions` if it has room for one more.

    `positions` is never written past its end, whatever the key. It is int32, or int64 for 2**31 values and more.
    """
    start, key1 = _words(key)
    return int(_positions(size, start, key1, np.int32(kept), np.empty(_BLOCK, np.int32), positions))


def scatter(values: Floats, positions: NDArray[Any], out: Floats, accumulate: bool) -> None:
    """``out`` = 0 but for ``out[positions] = values``; or ``out[positions] += values``. Positions are in range."""
    if accumulate:
        _add(frozen(values), frozen(positions), out)
    else:
        out.fill(0)
        _store(frozen(values), frozen(positions), out)


def _words(key: Key) -> tuple[Any, Any]:
    return np.uint32(key[0]), np.uint32(key[1])


@jit
def _draw(start: Any, key1: Any, out: Any) -> None:
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


@jit
def _collect(values: Any, start: Any, key1: Any, kept: Any, factor: Any, block: Any, sent: Any) -> Any:
    count: Any = 0
    last = sent.size - 1
    for first in range(0, values.size, block.size):
        size = min(block.size, values.size - first)
        _draw(np.uint32(start + np.uint32(first)), key1, block)
        for i in range(size):
            sent[min(count, last)] = values[first + i] * factor
            count += np.int64(block[i] < kept)
    return count


@jit
def _positions(size: int, start: Any, key1: Any, kept: Any, block: Any, positions: Any) -> Any:
    count: Any = 0
    last = positions.size - 1
    for first in range(0, size, block.size):
        _draw(np.uint32(start + np.uint32(first)), key1, block)
        for i in range(min(block.size, size - first)):
            positions[min(count, last)] = first + i
            count += np.int64(block[i] < kept)
    return count


@jit
def _store(values: Any, positions: Any, out: Any) -> None:
    for i in range(positions.size):
        out[positions[i]] = values[i]


@jit
def _add(values: Any, positions: Any, out: Any) -> None:
    for i in range(positions.size):
        out[positions[i]] += values[i]
