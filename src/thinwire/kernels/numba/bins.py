"""2**N equal bins between the smallest and the largest value (Øland & Raj §3.1, algorithms 1 and 2).

    i = floor(2**N · (w − lo) / (hi − lo)), the end clamped        decoded = lo + (hi − lo)·(i + 0.5) / 2**N

The paper's encoder has (hi − w), which its decoder would mirror; this is what the decoder inverts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.numba.jit import frozen, jit


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
