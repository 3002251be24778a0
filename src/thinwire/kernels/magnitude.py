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

_INTEGER: dict[np.dtype[Any], Any] = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}
_MAGNITUDE_32 = np.int32(0x7FFFFFFF)
_MAGNITUDE_64 = np.int64(0x7FFFFFFFFFFFFFFF)


def max_magnitude(values: Floats) -> float:
    """The largest absolute value of float32[n] or float64[n]; 0.0 when empty.

    Infinite or NaN as soon as one value is infinite or NaN: the caller decides what to raise.

    Example:
        >>> max_magnitude(np.array([1.0, -3.0, 2.0], dtype=np.float32))
        3.0
    """
    integer = _INTEGER[values.dtype]
    kernel = _max_bits_32 if integer is np.int32 else _max_bits_64
    return float(integer(kernel(frozen(values.view(integer)))).view(values.dtype))


def max_magnitude_of_sum(residual: Floats, residual_scale: float, values: Floats) -> float:
    """`max_magnitude` of ``residual_scale * residual + values``, which is not stored."""
    integer = _INTEGER[values.dtype]
    kernel = _max_bits_of_sum_32 if integer is np.int32 else _max_bits_of_sum_64
    bits = kernel(residual, values.dtype.type(residual_scale), frozen(values))
    return float(integer(bits).view(values.dtype))


def frozen(array: Any) -> Any:
    """A read-only view. Kernels see every input as read-only, so that they are compiled once, not twice."""
    view = array.view()
    view.flags.writeable = False
    return view


# One kernel per type, because Numba reads a number's bits only where its type is spelled out.


@jit
def _max_bits_32(bits: Any) -> Any:
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & _MAGNITUDE_32)
    return largest


@jit
def _max_bits_64(bits: Any) -> Any:
    largest = np.int64(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & _MAGNITUDE_64)
    return largest


@jit
def _max_bits_of_sum_32(residual: Any, scale: Any, values: Any) -> Any:
    largest = np.int32(0)
    for i in range(values.size):
        largest = max(largest, np.float32(scale * residual[i] + values[i]).view(np.int32) & _MAGNITUDE_32)
    return largest


@jit
def _max_bits_of_sum_64(residual: Any, scale: Any, values: Any) -> Any:
    largest = np.int64(0)
    for i in range(values.size):
        largest = max(largest, np.float64(scale * residual[i] + values[i]).view(np.int64) & _MAGNITUDE_64)
    return largest
