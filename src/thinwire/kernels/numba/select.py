"""The largest magnitudes of a tensor, without sorting it.

An exact selection reads the data twice: a sample tells a magnitude that a few more than k values reach; those are
gathered, and only they are partitioned. Where the sample misled (or too many values are equal), all are partitioned.

With a threshold, one pass takes what reaches it out of the tensor and its residual (`take`). Thresholds and ranges are
guessed from a sample: one value from each of equal stretches.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Bytes
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
_PLACES = np.argsort(1 - _MARKED.astype(np.int64), axis=1, kind="stable").astype(np.uint64)
"""Of every byte, the places of its bits that are set, from the highest on, and then of the others."""
_COUNTS = _MARKED.sum(axis=1, dtype=np.uint64)
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
    _take(frozen(values), None, least, least, None, flags, flags.view(np.uint64), None, bits, positions)
    return positions[:count]


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
    """Takes the values that reach `bound` out of v = values, or residual_scale·residual + values.

    Args:
        values: float32[n] or float64[n], finite; never written.
        bound: a magnitude above 0.
        bitmap: uint8[ceil(n / 8)], filled: a bit for each value taken, the first value in the highest bit.
        room: of the type of the values, n + 4 of them or more; holds the result.
        residual: updated to v, less what was taken; None: nothing is kept.
        residual_scale: what the residual is multiplied by first.
        tau: what is taken off the magnitude of such a value; None takes all of it.

    Returns:
        The values v that were taken, in order: a view of `room`.

    Example:
        >>> bitmap, room, residual = np.empty(1, np.uint8), np.empty(7, np.float32), np.zeros(3, np.float32)
        >>> take(
        ...     np.array([1.0, -3.0, 2.0], np.float32), 2.0, bitmap=bitmap, room=room, residual=residual, tau=2.0
        ... ).tolist()
        [-3.0, 2.0]
        >>> bitmap.tolist(), residual.tolist()
        ([96], [1.0, -1.0, 0.0])
    """
    kind = values.dtype.type
    flags = np.empty(_BLOCK, np.uint8)
    num_taken = _take(
        frozen(values),
        residual,
        kind(residual_scale),
        kind(bound),
        None if tau is None else kind(tau),
        flags,
        flags.view(np.uint64),
        np.empty(_BLOCK, kind),
        bitmap,
        room,
    )
    return room[: int(num_taken)]


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
        count += _count_block(values[start : start + _NEAR], None, bound, bound, None)
    return count


@jit
def _count_block(values: Any, residual: Any, scale: Any, least: Any, most: Any) -> Any:
    """How many magnitudes are at least `least`, or at most `most` (which NaN is not); the other is None."""
    count = np.int32(0)
    for i in range(values.size):
        magnitude = abs(values[i] if residual is None else scale * residual[i] + values[i])
        # A plain sum would widen to 64 bits.
        if least is not None:
            count = np.int32(count + np.int32(magnitude >= least))
        if most is not None:
            count = np.int32(count + np.int32(magnitude <= most))
    return count


@jit
def _take(
    values: Any,
    residual: Any,
    scale: Any,
    bound: Any,
    tau: Any,
    flags: Any,
    words: Any,
    block: Any,
    bitmap: Any,
    taken: Any,
) -> Any:
    """Appends the values taken, or their positions where `block` is None; `bitmap` is then that of one block."""
    at = np.uint64(0)
    for start in range(0, values.size, _BLOCK):
        stop = min(start + _BLOCK, values.size)
        held = None if residual is None else residual[start:stop]
        _sift(values[start:stop], held, scale, bound, tau, flags, block)
        first = 0 if block is None else start // 8
        bits = bitmap[first : first + (stop - start + 7) // 8]
        gather(flags, words, stop - start, bits)
        at = _compact(bits, block, np.uint64(start), taken, at)
    return at


@jit
def _sift(values: Any, residual: Any, scale: Any, bound: Any, tau: Any, flags: Any, block: Any) -> None:
    """Flags the values that reach the bound, copies all into `block`, and leaves in the residual what is not taken."""
    wide_vectors()
    zero = bound - bound
    for i in range(values.size):
        v = values[i] if residual is None else scale * residual[i] + values[i]
        reaches = abs(v) >= bound
        flags[i] = np.uint8(reaches)
        if block is not None:
            block[i] = v
        if residual is not None:
            if tau is None:
                residual[i] = zero if reaches else v
            else:
                residual[i] = v - (tau if v > 0 else -tau) if reaches else v


@jit
def _compact(bits: Any, source: Any, first: Any, out: Any, at: Any) -> Any:
    """Appends what the bits mark, values of `source` or positions from `first` on; returns where `out` now ends.

    Three are written for every byte and counted afterwards, without a branch to mispredict; more are rare. All is
    unsigned: Numba looks twice at an index that may be negative.
    """
    for i in range(bits.size):
        byte, base = bits[i], np.uint64(8 * i)
        if source is None and byte == 0:  # exact selections are sparse: skipping is predicted well
            continue
        count = _COUNTS[byte]
        for j in range(3):
            place = base + _PLACES[byte, j]
            out[at + np.uint64(j)] = first + place if source is None else source[place]
        if count > _3:
            for j in range(_3, count):
                place = base + _PLACES[byte, j]
                out[at + j] = first + place if source is None else source[place]
        at += count
    return at


def sample_of(values: Any, size: int) -> Any:
    """`size` of the values without replacement, one from a random place of each of equal stretches; or all of them.

    The places depend on the two sizes alone, so that equal tensors give equal samples everywhere.
    """
    if size >= values.size:
        return values
    edges = np.arange(size + 1) * values.size // size
    return values[edges[:-1] + (_places(size) * np.diff(edges) >> 24)]


def checked_sample_of(values: Any, size: int, *, residual: Any = None, residual_scale: float = 1.0) -> tuple[Any, bool]:
    """`sample_of` v = values, or residual_scale·residual + values, and whether all of v is finite: one pass.

    Example:
        >>> checked_sample_of(np.array([1.0, -3.0, 2.0], np.float32), 3)
        (array([ 1., -3.,  2.], dtype=float32), True)
    """
    kind = values.dtype.type
    size = min(size, values.size)
    sample = np.empty(size, kind)
    random = _places(size) if size < values.size else np.zeros(size, np.int32)
    most = np.finfo(kind).max
    num_finite = _check(
        frozen(values), None if residual is None else frozen(residual), kind(residual_scale), most, random, sample
    )
    return sample, int(num_finite) == values.size


def _places(size: int) -> NDArray[np.int32]:
    """Where in each of `size` stretches: the 24 high bits of a fixed key's draws."""
    random = np.empty(size, np.int32)
    high_bits((0, 0), 0, random)
    return random


@jit
def _check(values: Any, residual: Any, scale: Any, most: Any, random: Any, sample: Any) -> int:
    """Fills the sample, block by block while the block is near; returns how many values are finite."""
    size, taken, edge, num_finite = sample.size, 0, 0, 0
    next_edge = values.size // max(1, size)
    for start in range(0, values.size, _NEAR):
        stop = min(start + _NEAR, values.size)
        held = None if residual is None else residual[start:stop]
        num_finite += _count_block(values[start:stop], held, scale, None, most)
        while taken < size:
            place = edge + (np.int64(random[taken]) * (next_edge - edge) >> 24)
            if place >= stop:
                break
            sample[taken] = values[place] if residual is None else scale * residual[place] + values[place]
            taken += 1
            edge, next_edge = next_edge, (taken + 1) * values.size // size
    return num_finite
