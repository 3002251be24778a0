"""The largest magnitudes of a tensor, without sorting it.

An exact selection reads the data twice: a sample tells a magnitude that a few more than k values reach; those are
gathered, and only they are partitioned. Where the sample misled (or too many values are equal), all are partitioned.

Ranges are guessed from a sample: one value from each of equal stretches.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.numba.bits import gather
from thinwire.kernels.numba.jit import frozen, jit, wide_vectors
from thinwire.kernels.numba.stochastic import high_bits

_SMALL = 1 << 14
"""Up to here partitioning everything is quicker than being clever."""
_SAMPLE = 1 << 17
_BLOCK = 1 << 12  # values, their copies and flags stay in the first-level cache
_NEAR = 1 << 16
"""Values that stay in the second-level cache."""
_SPARE = 4  # places behind the last that `_compact` writes and does not count
_MARKED = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
PLACES = np.argsort(1 - _MARKED.astype(np.int64), axis=1, kind="stable").astype(np.uint64)
"""Of every byte, the places of its bits that are set, from the highest on, and then of the others."""
COUNTS = _MARKED.sum(axis=1, dtype=np.uint64)
_3 = np.uint64(3)


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
        return _partitioned(values, k)
    smallest = float(np.finfo(values.dtype).smallest_subnormal)
    bound = max(smallest, _likely_bound(values, k))
    count = count_from(values, bound)
    if count < k and bound == smallest:
        return select_from(values, bound, count)
    if not k <= count <= 2 * k + _SMALL:
        return _partitioned(values, k)
    candidates = select_from(values, bound, count)
    return candidates[_partitioned(values[candidates], k)]


def _partitioned(values: Any, k: int) -> NDArray[np.int64]:
    """`select_top` by partitioning all magnitudes."""
    magnitudes = np.abs(values)
    threshold = np.partition(magnitudes, values.size - k)[values.size - k]
    above = np.flatnonzero(magnitudes > threshold)
    ties = np.flatnonzero(magnitudes == threshold)[: k - above.size]
    chosen = np.sort(np.concatenate((above, ties)))
    nonzero: NDArray[np.int64] = chosen[values[chosen] != 0]
    return nonzero


def count_from(values: Any, bound: float) -> int:
    """How many magnitudes are at least `bound`."""
    return int(_count(frozen(values), values.dtype.type(bound)))


def select_from(values: Any, bound: float, count: int) -> NDArray[np.int64]:
    """The positions, ascending, of all magnitudes of at least `bound`, of which there are `count`."""
    positions = np.empty(count + _SPARE, np.int64)
    flags = np.empty(_BLOCK, np.uint8)
    bits, least = np.empty(_BLOCK // 8, np.uint8), values.dtype.type(bound)
    _select(frozen(values), least, flags, flags.view(np.uint64), bits, positions)
    return positions[:count]


def _likely_bound(values: Any, k: int) -> float:
    """A magnitude that, going by a sample, a few more than k values reach; 0 where k is nearly all of them."""
    sample = np.abs(values[:: max(1, values.size // _SAMPLE)])
    expected = k * sample.size / values.size
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    if rank >= sample.size:
        return 0.0
    return float(np.partition(sample, sample.size - rank)[sample.size - rank])


@jit
def _count(values: Any, bound: Any) -> int:
    count = 0
    for start in range(0, values.size, _NEAR):
        count += _count_block(values[start : start + _NEAR], bound)
    return count


@jit
def _count_block(values: Any, least: Any) -> Any:
    count = np.int32(0)
    for i in range(values.size):
        count = np.int32(count + np.int32(abs(values[i]) >= least))  # a plain sum would widen to 64 bits
    return count


@jit
def _select(values: Any, bound: Any, flags: Any, words: Any, bits: Any, positions: Any) -> None:
    """Flags, their bits and positions of a block at a time."""
    at = np.uint64(0)
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK]
        _flag(block, bound, flags)
        marked = bits[: (block.size + 7) // 8]
        gather(flags, words, block.size, marked)
        at = _compact(marked, np.uint64(start), positions, at)


@jit
def _flag(values: Any, bound: Any, flags: Any) -> None:
    wide_vectors()
    for i in range(values.size):
        flags[i] = np.uint8(abs(values[i]) >= bound)


@jit
def _compact(bits: Any, first: Any, out: Any, at: Any) -> Any:
    """Appends the positions, from `first` on, that the bits mark; returns where `out` now ends.

    Three are written for every byte and counted afterwards, without a branch to mispredict; more are rare. All is
    unsigned: Numba looks twice at an index that may be negative.
    """
    for i in range(bits.size):
        byte, base = bits[i], first + np.uint64(8 * i)
        if byte == 0:  # exact selections are sparse: skipping is predicted well
            continue
        count = COUNTS[byte]
        for j in range(3):
            out[at + np.uint64(j)] = base + PLACES[byte, j]
        if count > _3:
            for j in range(_3, count):
                out[at + j] = base + PLACES[byte, j]
        at += count
    return at


def sample_of(values: Any, size: int) -> Any:
    """`size` of the values without replacement, one from a random place of each of equal stretches; or all of them.

    The places depend on the two sizes alone, so that equal tensors give equal samples everywhere.
    """
    if size >= values.size:
        return values
    edges = np.arange(size + 1) * values.size // size
    return values[edges[:-1] + (places_of(size) * np.diff(edges) >> 24)]


def places_of(size: int) -> NDArray[np.int32]:
    """Where in each of `size` stretches: the 24 high bits of a fixed key's draws."""
    random = np.empty(size, np.int32)
    high_bits((0, 0), 0, random)
    return random
