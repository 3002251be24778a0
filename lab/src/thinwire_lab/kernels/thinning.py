"""Which values are kept by chance: a decoder that is told the key finds the encoder's choices again.

Every value is written and the position moves on only where it is kept, which leaves nothing to mispredict.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Floats, Key
from thinwire.kernels.numba.jit import frozen, jit
from thinwire.kernels.numba.stochastic import fill_draws, start_of

_BLOCK_DRAWS = 1 << 12


def collect_kept(values: Floats, *, key: Key, kept: int, factor: Any, sent: Floats) -> int:
    """Fills `sent` with factor·v of the values whose 24 random bits are below `kept`, in order; returns how many.

    Where they are not fewer than `sent` has room for, its content is undefined: call again with more.

    >>> sent = np.empty(4, np.float32)
    >>> collect_kept(np.array([1, 2, 3], np.float32), key=(1, 2), kept=1 << 24, factor=np.float32(2), sent=sent)
    3
    >>> sent[:3].tolist()
    [2.0, 4.0, 6.0]
    """
    block = np.empty(_BLOCK_DRAWS, np.int32)
    return int(_keep(frozen(values), values.size, *start_of(key), np.int32(kept), factor, block, sent))


def kept_positions(size: int, *, key: Key, kept: int, positions: NDArray[Any]) -> int:
    """How many of `size` values are kept; their positions, ascending, are in `positions` if it has room for one more.

    `positions` is never written past its end, whatever the key. It is int32, or int64 for 2**31 values and more.
    """
    block = np.empty(_BLOCK_DRAWS, np.int32)
    return int(_keep(None, size, *start_of(key), np.int32(kept), None, block, positions))


def scatter(values: Floats, positions: NDArray[Any], out: Floats, accumulate: bool) -> None:
    """``out`` = 0 but for ``out[positions] = values``; or ``out[positions] += values``. Positions are in range."""
    if not accumulate:
        out.fill(0)
    _scatter(frozen(values), frozen(positions), accumulate, out)


@jit
def _keep(values: Any, size: int, start: Any, key1: Any, kept: Any, factor: Any, block: Any, out: Any) -> Any:
    """Collects factor·v of the values that are kept, or their positions where values are None; returns how many."""
    count: Any = 0
    last = out.size - 1
    for first in range(0, size, block.size):
        fill_draws(np.uint32(start + np.uint32(first)), key1, block)
        for i in range(min(block.size, size - first)):
            out[min(count, last)] = first + i if values is None else values[first + i] * factor
            count += np.int64(block[i] < kept)
    return count


@jit
def _scatter(values: Any, positions: Any, accumulate: bool, out: Any) -> None:
    for i in range(positions.size):
        out[positions[i]] = out[positions[i]] + values[i] if accumulate else values[i]
