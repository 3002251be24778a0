"""The largest magnitude, found on the bits: the first of the two passes of an encoder.

The magnitude bits of IEEE numbers, read as integers, order like the magnitudes, and NaN and Inf come out on top. So
an integer maximum, which compilers vectorise (they do not vectorise a float maximum, because of NaN), finds the
maximum and answers "is everything finite?" with one comparison afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.kernels.contract import Floats
from thinwire.kernels.jit import jit
from thinwire.kernels.workspace import Workspace

_INTEGER: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float32): np.dtype(np.int32),
    np.dtype(np.float64): np.dtype(np.int64),
}


def max_magnitude(values: Floats) -> float:
    """The largest absolute value of float32[n] or float64[n]; 0.0 when empty.

    Infinite or NaN as soon as one value is infinite or NaN: the caller decides what to raise.

    Example:
        >>> max_magnitude(np.array([1.0, -3.0, 2.0], dtype=np.float32))
        3.0
    """
    integer = _INTEGER[values.dtype]
    bits = _max_bits(frozen(values).view(integer), integer.type(np.iinfo(integer).max))
    return float(integer.type(bits).view(values.dtype))


def max_magnitude_of_sum(residual: Floats, residual_scale: float, values: Floats, workspace: Workspace) -> float:
    """`max_magnitude` of ``residual_scale * residual + values``, of which only a block at a time is ever stored."""
    integer = _INTEGER[values.dtype]
    sums = workspace.sums(values.dtype)
    magnitude = integer.type(np.iinfo(integer).max)
    scale = values.dtype.type(residual_scale)
    bits = _max_bits_of_sum(residual, scale, frozen(values), sums, sums.view(integer), magnitude)
    return float(integer.type(bits).view(values.dtype))


def frozen(array: Any) -> Any:
    """A read-only view. Kernels see every input as read-only, so that they are compiled once, not twice."""
    view = array.view()
    view.flags.writeable = False
    return view


@jit
def _max_bits(bits: Any, magnitude: Any) -> Any:
    largest = bits.dtype.type(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & magnitude)
    return largest


@jit
def _max_bits_of_sum(residual: Any, scale: Any, values: Any, sums: Any, bits: Any, magnitude: Any) -> Any:
    """`bits` and `sums` are the same memory, as integers and as floats."""
    largest = bits.dtype.type(0)
    for start in range(0, values.size, sums.size):
        size = min(sums.size, values.size - start)
        for i in range(size):
            sums[i] = scale * residual[start + i] + values[start + i]
        for i in range(size):
            largest = max(largest, bits[i] & magnitude)
    return largest
