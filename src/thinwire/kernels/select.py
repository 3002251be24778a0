"""The largest magnitudes of a tensor, without sorting it.

An exact selection reads the data twice: a sample tells a magnitude that a few more than k values reach; those are
gathered, and only they are partitioned. Where the sample misled (or too many values are equal), all are partitioned.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels import plain
from thinwire.kernels.jit import jit
from thinwire.kernels.magnitude import frozen
from thinwire.kernels.uniform import high_bits

_SMALL = 1 << 14
"""Up to here partitioning everything is quicker than being clever."""
_SAMPLE = 1 << 17
_BLOCK = 1 << 13


def select_top(values: Any, k: int) -> NDArray[np.int64]:
    """The positions, ascending, of the k largest magnitudes; of equal ones the lower position. Zeros are left out.

    Args:
        values: float32[n] or float64[n], finite.
        k: 1 … n.

    Returns:
        int64[k], or fewer where fewer values are not zero.

    Example:
        >>> select_top(np.array([3.0, -3.0, 1.0, 2.0], np.float32), 2).tolist()
        [0, 1]
    """
    if values.size <= _SMALL:
        return plain.select_top(values, k)
    smallest = float(np.finfo(values.dtype).smallest_subnormal)
    bound = max(smallest, _likely_bound(values, k))
    count = count_from(values, bound)
    if count < k and bound == smallest:
        return select_from(values, bound, count)
    if not k <= count <= 2 * k + _SMALL:
        return plain.select_top(values, k)
    candidates = select_from(values, bound, count)
    return candidates[plain.select_top(values[candidates], k)]


def count_from(values: Any, bound: float) -> int:
    """How many magnitudes are at least `bound`."""
    return int(_count(frozen(values), values.dtype.type(bound)))


def select_from(values: Any, bound: float, count: int) -> NDArray[np.int64]:
    """The positions, ascending, of all magnitudes of at least `bound`, of which there are `count`."""
    positions = np.empty(count + 1, np.int64)
    flags = np.empty(_BLOCK, np.uint8)
    _gather(frozen(values), values.dtype.type(bound), flags, flags.view(np.uint64), positions)
    return positions[:count]


def sample_of(values: Any, size: int) -> Any:
    """`size` of the values without replacement, one from a random place of each of equal stretches; or all of them.

    The places depend on the two sizes alone, so that equal tensors give equal samples everywhere.
    """
    if size >= values.size:
        return values
    edges = np.arange(size + 1) * values.size // size
    random = np.empty(size, np.int32)
    high_bits((0, 0), 0, random)
    return values[edges[:-1] + (random * np.diff(edges) >> 24)]


def _likely_bound(values: Any, k: int) -> float:
    """A magnitude that, going by a sample, a few more than k values reach; 0 where k is nearly all of them."""
    sample = np.abs(values[:: max(1, values.size // _SAMPLE)])
    expected = k * sample.size / values.size
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    if rank >= sample.size:
        return 0.0
    return float(np.partition(sample, sample.size - rank)[sample.size - rank])


@jit
def _count(values: Any, bound: Any) -> Any:
    count = 0
    for start in range(0, values.size, 1 << 16):
        count += _count_block(values[start : start + (1 << 16)], bound)
    return count


@jit
def _count_block(values: Any, bound: Any) -> Any:
    count = np.int32(0)
    for i in range(values.size):
        count += np.int32(abs(values[i]) >= bound)
    return count


@jit
def _gather(values: Any, bound: Any, flags: Any, words: Any, positions: Any) -> None:
    """Eight flags at a time: most words are zero. In the others every position is written, and kept where it counts."""
    at = 0
    for start in range(0, values.size, _BLOCK):
        size = min(_BLOCK, values.size - start)
        _flag(values[start : start + size], bound, flags)
        flags[size : (size + 7) // 8 * 8] = 0
        for i in range((size + 7) // 8):
            if words[i]:
                for j in range(8 * i, 8 * i + 8):
                    positions[at] = start + j
                    at += flags[j]


@jit
def _flag(values: Any, bound: Any, flags: Any) -> None:
    for i in range(values.size):
        flags[i] = np.uint8(abs(values[i]) >= bound)
