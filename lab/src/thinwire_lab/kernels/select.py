"""What reaches a magnitude, taken out of a tensor and its residual in one pass; and the sample that finds a magnitude.

`thinwire.kernels.numba.select` says which places are sampled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.bits import gather
from thinwire.kernels.numba.jit import frozen, jit, wide_vectors
from thinwire.kernels.numba.select import COUNTS, PLACES, places_of

_BLOCK = 1 << 12  # values, their copies and flags stay in the first-level cache
_NEAR = 1 << 16
"""Values that stay in the second-level cache."""
_3 = np.uint64(3)


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


def checked_sample_of(values: Any, size: int, *, residual: Any = None, residual_scale: float = 1.0) -> tuple[Any, bool]:
    """`sample_of` v = values, or residual_scale·residual + values, and whether all of v is finite: one pass.

    >>> checked_sample_of(np.array([1.0, -3.0, 2.0], np.float32), 3)
    (array([ 1., -3.,  2.], dtype=float32), True)
    """
    kind = values.dtype.type
    size = min(size, values.size)
    sample = np.empty(size, kind)
    random = places_of(size) if size < values.size else np.zeros(size, np.int32)
    most = np.finfo(kind).max
    num_finite = _check(
        frozen(values), None if residual is None else frozen(residual), kind(residual_scale), most, random, sample
    )
    return sample, int(num_finite) == values.size


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
    """Appends the values taken; returns how many."""
    at = np.uint64(0)
    for start in range(0, values.size, _BLOCK):
        stop = min(start + _BLOCK, values.size)
        held = None if residual is None else residual[start:stop]
        _sift(values[start:stop], held, scale, bound, tau, flags, block)
        bits = bitmap[start // 8 : start // 8 + (stop - start + 7) // 8]
        gather(flags, words, stop - start, bits)
        at = _compact(bits, block, taken, at)
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
        block[i] = v
        if residual is not None:
            if tau is None:
                residual[i] = zero if reaches else v
            else:
                residual[i] = v - (tau if v > 0 else -tau) if reaches else v


@jit
def _compact(bits: Any, source: Any, out: Any, at: Any) -> Any:
    """Appends the values of `source` that the bits mark, as `thinwire.kernels.numba.select` appends positions."""
    for i in range(bits.size):
        byte, base = bits[i], np.uint64(8 * i)
        count = COUNTS[byte]
        for j in range(3):
            out[at + np.uint64(j)] = source[base + PLACES[byte, j]]
        if count > _3:
            for j in range(_3, count):
                out[at + j] = source[base + PLACES[byte, j]]
        at += count
    return at


@jit
def _count_finite(values: Any, residual: Any, scale: Any, most: Any) -> Any:
    """How many magnitudes are at most `most`, which NaN is not."""
    count = np.int32(0)
    for i in range(values.size):
        v = values[i] if residual is None else scale * residual[i] + values[i]
        count = np.int32(count + np.int32(abs(v) <= most))  # a plain sum would widen to 64 bits
    return count


@jit
def _check(values: Any, residual: Any, scale: Any, most: Any, random: Any, sample: Any) -> int:
    """Fills the sample, block by block while the block is near; returns how many values are finite."""
    size, taken, edge, num_finite = sample.size, 0, 0, 0
    next_edge = values.size // max(1, size)
    for start in range(0, values.size, _NEAR):
        stop = min(start + _NEAR, values.size)
        held = None if residual is None else residual[start:stop]
        num_finite += _count_finite(values[start:stop], held, scale, most)
        while taken < size:
            place = edge + (np.int64(random[taken]) * (next_edge - edge) >> 24)
            if place >= stop:
                break
            sample[taken] = values[place] if residual is None else scale * residual[place] + values[place]
            taken += 1
            edge, next_edge = next_edge, (taken + 1) * values.size // size
    return num_finite
