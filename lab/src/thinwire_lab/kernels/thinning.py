"""Which values are kept: by chance, where a decoder that is told the key finds the choices again, or by magnitude.

Every value is written and the position moves on only where it is kept, which leaves nothing to mispredict.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Bytes, Floats, Key
from thinwire.kernels.numba.jit import frozen, jit
from thinwire.kernels.numba.stochastic import fill_draws, start_of

_BLOCK_DRAWS = 1 << 12


def collect_kept(values: Floats, *, key: Key, kept: int, factor: Any, sent: Floats) -> int:
    """Fills `sent` with factor·v of the values whose 24 random bits are below `kept`, in order; returns how many.

    Where they are not fewer than `sent` has room for, its content is undefined: call again with more.
    """
    block = np.empty(_BLOCK_DRAWS, np.int32)
    return int(_keep(frozen(values), values.size, *start_of(key), np.int32(kept), factor, block, sent))


def kept_positions(size: int, *, key: Key, kept: int, positions: NDArray[Any]) -> int:
    """How many of `size` values are kept; their positions, ascending, are in `positions` if it has room for one more.

    `positions` is never written past its end, whatever the key. It is int32, or int64 for 2**31 values and more.
    """
    block = np.empty(_BLOCK_DRAWS, np.int32)
    return int(_keep(None, size, *start_of(key), np.int32(kept), None, block, positions))


def take(
    values: Any,
    bound: float,
    *,
    bitmap: Bytes,
    room: Any,
    residual: Any = None,
    residual_scale: float = 1.0,
    tau: float | None = None,
) -> Any:
    """Takes the values of magnitude `bound` or more out of v = values, or residual_scale·residual + values.

    `bitmap` gets a bit for each of them, the first value in the highest bit; `room` holds n + 1 values, and the result.
    The residual becomes v less what was taken: the whole value, or `tau` of its magnitude.
    """
    kind = values.dtype.type
    least = None if tau is None else kind(tau)
    bitmap.fill(0)
    return room[: int(_take(frozen(values), residual, kind(residual_scale), kind(bound), least, bitmap, room))]


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
def _take(values: Any, residual: Any, scale: Any, bound: Any, tau: Any, bitmap: Any, taken: Any) -> Any:
    """Appends the values taken; returns how many."""
    count: Any = 0
    zero = bound - bound
    for i in range(values.size):
        v = values[i] if residual is None else scale * residual[i] + values[i]
        reaches = abs(v) >= bound
        taken[count] = v
        count += np.int64(reaches)
        bitmap[i >> 3] |= np.uint8(reaches) << np.uint8(7 - (i & 7))
        if residual is not None:
            if tau is None:
                residual[i] = zero if reaches else v
            else:
                residual[i] = v - (tau if v > 0 else -tau) if reaches else v
    return count
