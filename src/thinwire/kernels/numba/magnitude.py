"""The largest magnitude, found on the bits: the first of the two passes of an encoder.

The magnitude bits of IEEE numbers, read as integers, order like the magnitudes, and NaN and Inf come out on top. So
an integer maximum, which compilers vectorise (they do not vectorise a float maximum, because of NaN), finds the
maximum and answers "is everything finite?" with one comparison afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.extending import intrinsic

from thinwire.kernels.contract import Floats
from thinwire.kernels.numba.jit import frozen, jit, wide_vectors


def max_magnitude(values: Floats, residual: Floats | None = None, residual_scale: float = 1.0) -> float:
    """The largest absolute value of v = values, or residual_scale·residual + values; 0.0 when empty.

    Infinite or NaN as soon as one value is infinite or NaN: the caller decides what to raise.

    Args:
        values: float32[n] or float64[n].
        residual: of the same type and size; only read.
        residual_scale: what the residual is multiplied by.

    Example:
        >>> import numpy as np
        >>> max_magnitude(np.array([1.0, -3.0, 2.0], dtype=np.float32))
        3.0
    """
    return largest_magnitude(frozen(values), residual, values.dtype.type(residual_scale))  # type: ignore[no-any-return]


@intrinsic
def magnitude_bits(typing_context: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    """In a kernel: the bits of a float32 or float64 without its sign, as int32 or int64."""
    bits_type: Any = types.int32 if value == types.float32 else types.int64

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], context.get_value_type(bits_type))
        return builder.and_(bits, bits.type((1 << (bits_type.bitwidth - 1)) - 1))

    return bits_type(value), generate


@intrinsic
def float_of_bits(typing_context: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    """In a kernel: the float32 or float64 of these bits, int32 or int64."""
    value_type = types.float32 if bits == types.int32 else types.float64

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(value_type))

    return value_type(bits), generate


@jit
def largest_magnitude(values: Any, residual: Any, scale: Any) -> Any:
    """`max_magnitude` of a read-only view, with the scale in the type of the values."""
    wide_vectors()
    largest = magnitude_bits(values.dtype.type(0))
    for i in range(values.size):
        largest = max(largest, magnitude_bits(values[i] if residual is None else scale * residual[i] + values[i]))
    return float_of_bits(largest)
