"""Floats to equally spaced whole numbers and back: int8 levels, numbers within ±top, bins between two ends.

The addition of 1.5·2**23 (2**52 for float64) and its subtraction round to a whole number, half to even, in the vector
unit, where calling `rint` would not.
"""

from __future__ import annotations

import math
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
        scale: what a level is worth, in the type of `values`.
        levels: int8[n], filled.
        residual: what was not sent before, updated to v − scale·level; None: nothing is kept.
        residual_scale: what the residual is multiplied by first.

    Example:
        >>> levels = np.empty(3, np.int8)
        >>> round_to_int8(np.array([1.0, -0.5, 0.25], np.float32), scale=0.5, levels=levels)
        >>> levels.tolist()
        [2, -1, 0]
    """
    kind = values.dtype.type
    top, rounds = kind(127), kind(_ROUNDS[kind])
    _round(frozen(values), residual, kind(residual_scale), kind(scale), None, top, rounds, levels)


def scale_levels(levels: NDArray[np.int8], *, scale: float, out: Any, accumulate: bool) -> None:
    """``out = scale * levels``, or ``out += scale * levels``."""
    _scale(frozen(levels), out.dtype.type(scale), None, accumulate, out)


def round_to_integers(values: Any, *, scale: float, top: int, out: NDArray[np.int32]) -> None:
    """Fills `out` with round(v / scale · top), half to even, within ±top; scale > 0."""
    _round(frozen(values), None, None, float(scale), float(top), float(top), _ROUNDS[np.float64], out)


def scale_integers(numbers: NDArray[Any], *, scale: float, top: int, out: Any, accumulate: bool) -> None:
    """``out = scale · numbers / top``, computed in float64; or added."""
    _scale(frozen(numbers), float(scale), float(top), accumulate, out)


@jit
def _round(
    values: Any, residual: Any, residual_scale: Any, scale: Any, times: Any, top: Any, rounds: Any, out: Any
) -> None:
    """In the type of `scale`: round(v / scale), or round(v / scale · times), within ±top."""
    wide_vectors()
    for i in range(values.size):
        v = values[i] if residual is None else residual_scale * residual[i] + values[i]
        q = v / scale
        if times is not None:
            q = q * times
        q = q if q < top else top
        q = q if q > -top else -top
        q = (q + rounds) - rounds
        if residual is not None:
            residual[i] = v - q * scale
        out[i] = np.int32(q)


@jit
def _scale(numbers: Any, scale: Any, top: Any, accumulate: bool, out: Any) -> None:
    """In the type of `out`: numbers · scale, or scale · numbers / top in float64."""
    kind = out.dtype.type
    for i in range(numbers.size):
        value = kind(numbers[i]) * scale if top is None else kind(scale * (np.float64(numbers[i]) / top))
        out[i] = out[i] + value if accumulate else value


def bin_values(values: Any, *, low: float, high: float, num_bits: int, out: NDArray[Any]) -> None:
    """Fills out[n], uint16 or int32, with bins 0 … 2**num_bits − 1 of float32[n] or float64[n] values, low < high.

    Example:
        >>> bins = np.empty(3, np.int32)
        >>> bin_values(np.array([-1.0, 0.0, 1.0]), low=-1.0, high=1.0, num_bits=2, out=bins)
        >>> bins.tolist()
        [0, 2, 3]
    """
    _bins(frozen(values), _half(low, high), float(low), float(high), 2.0**num_bits, out)


def value_of_bins(bins: NDArray[Any], *, low: float, high: float, num_bits: int, out: Any, accumulate: bool) -> None:
    """``out`` = the middle of each bin, or ``out +=``."""
    _middles(frozen(bins), float(low), float(high), 2.0**num_bits, accumulate, out)


def entropy_of(bins: NDArray[Any]) -> float:
    """Zero-order entropy of the bins, in bits.

    Example:
        >>> entropy_of(np.array([0, 0, 1, 1], np.int32))
        1.0
    """
    counts = np.unique(bins, return_counts=True)[1]
    shares = counts / bins.size
    return max(0.0, -math.fsum((shares * np.log2(shares)).tolist()))


def _half(low: float, high: float) -> float:
    """One half where high − low would overflow, else 1."""
    return 1.0 if math.isfinite(float(high) - float(low)) else 0.5


@jit
def _bins(values: Any, half: float, low: float, high: float, count: float, out: Any) -> None:
    base, width = low * half, high * half - low * half
    for i in range(values.size):
        place: Any = (np.float64(values[i]) * half - base) / width * count
        place = place if place < count - 1.0 else count - 1.0
        out[i] = np.int32(place)


@jit
def _middles(bins: Any, low: float, high: float, count: float, accumulate: bool, out: Any) -> None:
    kind = out.dtype.type
    for i in range(bins.size):
        share = (np.float64(bins[i]) + 0.5) / count
        value = kind(low * (1.0 - share) + high * share)
        out[i] = out[i] + value if accumulate else value
