"""Floats to equally spaced whole numbers within ±127, and back.

Adding 1.5·2**23 (2**52 for float64) and subtracting it again rounds to a whole number, half to even, in the vector
unit, which a call of `rint` would not use.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.numba.jit import frozen, jit, wide_vectors

_ROUNDS: dict[Any, float] = {np.float32: 1.5 * 2**23, np.float64: 1.5 * 2**52}


def round_to_int8(
    values: Any, *, scale: float, levels: NDArray[np.int8], residual: Any = None, residual_scale: float = 1.0
) -> None:
    """Fills `levels` with round(v / scale) within ±127, v = residual_scale·residual + values, scale > 0.

    Args:
        values: float32[n] or float64[n], finite; never written.
        scale: the value of level 1, in the type of `values`.
        levels: int8[n], filled.
        residual: the unsent values, updated to v − scale·level; None: no residual.
        residual_scale: the residual is multiplied by it first.

    Example:
        >>> levels = np.empty(3, np.int8)
        >>> round_to_int8(np.array([1.0, -0.5, 0.25], np.float32), scale=0.5, levels=levels)
        >>> levels.tolist()
        [2, -1, 0]
    """
    kind = values.dtype.type
    _round(frozen(values), residual, kind(residual_scale), kind(scale), kind(127), kind(_ROUNDS[kind]), levels)


def scale_levels(levels: NDArray[np.int8], *, scale: float, out: Any, accumulate: bool) -> None:
    """``out = scale * levels``, or ``out += scale * levels``."""
    _scale(frozen(levels), out.dtype.type(scale), accumulate, out)


@jit
def _round(values: Any, residual: Any, residual_scale: Any, scale: Any, top: Any, rounds: Any, out: Any) -> None:
    wide_vectors()
    for i in range(values.size):
        v = values[i] if residual is None else residual_scale * residual[i] + values[i]
        q = v / scale
        q = q if q < top else top
        q = q if q > -top else -top
        q = (q + rounds) - rounds
        if residual is not None:
            residual[i] = v - q * scale
        out[i] = np.int32(q)


@jit
def _scale(numbers: Any, scale: Any, accumulate: bool, out: Any) -> None:
    kind = out.dtype.type
    for i in range(numbers.size):
        value = kind(numbers[i]) * scale
        out[i] = out[i] + value if accumulate else value
