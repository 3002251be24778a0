"""The largest magnitude, found on the bits: the first of the two passes of an encoder.

The magnitude bits of IEEE numbers, read as integers, order like the magnitudes, and NaN and Inf come out on top. So
an integer maximum, which compilers vectorise (they do not vectorise a float maximum, because of NaN), finds the
maximum and answers "is everything finite?" with one comparison afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.kernels.contract import Floats
from thinwire.kernels.numba.jit import jit, wide_vectors

_BITS_32, _BITS_64 = np.int32(0x7FFFFFFF), np.int64(0x7FFFFFFFFFFFFFFF)  # all but the sign
_FLOAT32 = np.dtype(np.float32)


def max_magnitude(values: Floats) -> float:
    """The largest absolute value of float32[n] or float64[n]; 0.0 when empty.

    Infinite or NaN as soon as one value is infinite or NaN: the caller decides what to raise.

    Example:
        >>> max_magnitude(np.array([1.0, -3.0, 2.0], dtype=np.float32))
        3.0
    """
    return max_of_frozen(frozen(values))


def frozen(array: Any) -> Any:
    """A read-only view. Kernels see every input as read-only, so that they are compiled once, not twice."""
    view = array.view()
    view.setflags(write=False)
    return view


def max_of_frozen(values: Any) -> float:
    """`max_magnitude` of a read-only view."""
    kernel = _max_32 if values.dtype == _FLOAT32 else _max_64
    return kernel(values)  # type: ignore[no-any-return]


def max_of_sum(residual: Any, residual_scale: Any, values: Any) -> float:
    """`max_magnitude` of ``residual_scale * residual + values``, which is not stored; `values` is a read-only view."""
    kernel = _max_of_sum_32 if values.dtype == _FLOAT32 else _max_of_sum_64
    return kernel(residual, residual_scale, values)  # type: ignore[no-any-return]


# One kernel per type, because Numba reads a number's bits only where its type is spelled out.


@jit
def _max_32(values: Any) -> Any:
    wide_vectors()
    largest = np.int32(0)
    for i in range(values.size):
        largest = max(largest, np.float32(values[i]).view(np.int32) & _BITS_32)
    return np.int32(largest).view(np.float32)


@jit
def _max_64(values: Any) -> Any:
    wide_vectors()
    largest = np.int64(0)
    for i in range(values.size):
        largest = max(largest, np.float64(values[i]).view(np.int64) & _BITS_64)
    return np.int64(largest).view(np.float64)


@jit
def _max_of_sum_32(residual: Any, scale: Any, values: Any) -> Any:
    wide_vectors()
    largest = np.int32(0)
    for i in range(values.size):
        largest = max(largest, np.float32(scale * residual[i] + values[i]).view(np.int32) & _BITS_32)
    return np.int32(largest).view(np.float32)


@jit
def _max_of_sum_64(residual: Any, scale: Any, values: Any) -> Any:
    wide_vectors()
    largest = np.int64(0)
    for i in range(values.size):
        largest = max(largest, np.float64(scale * residual[i] + values[i]).view(np.int64) & _BITS_64)
    return np.int64(largest).view(np.float64)
