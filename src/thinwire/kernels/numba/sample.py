"""A sample of a tensor, from which thresholds and ranges are guessed: one value from each of equal stretches."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.numba.jit import frozen, jit
from thinwire.kernels.numba.select import NEAR, count_block
from thinwire.kernels.numba.uniform import high_bits


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
    for start in range(0, values.size, NEAR):
        stop = min(start + NEAR, values.size)
        held = None if residual is None else residual[start:stop]
        num_finite += count_block(values[start:stop], held, scale, None, most)
        while taken < size:
            place = edge + (np.int64(random[taken]) * (next_edge - edge) >> 24)
            if place >= stop:
                break
            sample[taken] = values[place] if residual is None else scale * residual[place] + values[place]
            taken += 1
            edge, next_edge = next_edge, (taken + 1) * values.size // size
    return num_finite
