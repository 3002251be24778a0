"""Stochastic rounding to a few signed levels, even or by powers of two (QSGD §3.1; DoubleSqueeze §3.2).

A magnitude a = |v| / norm between two neighbouring levels goes to the upper one with the probability that makes the
expectation a. Level k of s has the value k / s ("linear") or 2**(k − s), with 0 for k = 0 ("natural").
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import UNIT, Key
from thinwire.kernels.numba.stochastic import high_bits

MAX_LEVELS = 1 << 14
MAX_NATURAL_LEVELS = 64
_BLOCK = 1 << 16


def round_to_levels(
    values: Any, *, norms: Any, bucket: int, top: int, natural: bool, key: Key, out: NDArray[np.int16]
) -> None:
    """Fills `out` with signed levels −top … top."""
    random = np.empty(min(_BLOCK, values.size), np.int32)
    for first in range(0, values.size, _BLOCK):
        part = values[first : first + _BLOCK].astype(np.float64)
        high_bits(key, first, random)
        norm = norms[np.arange(first, first + part.size) // bucket].astype(np.float64)
        a = np.divide(np.abs(part), norm, out=np.zeros(part.size), where=norm > 0)
        level, rest = _natural(a, top) if natural else _linear(a, top)
        level = np.minimum(level + (random[: part.size] * UNIT < rest), top)
        out[first : first + part.size] = np.where(part > 0, level, -level)


def _linear(a: Any, top: int) -> tuple[Any, Any]:
    """Returns the level below each magnitude, and the probability of the one above."""
    level = np.floor(a * top)
    return level, a * top - level


def _natural(a: Any, top: int) -> tuple[Any, Any]:
    """As `_linear`, of levels that are powers of two."""
    lowest = 2.0 ** (1 - top)
    mantissa, exponent = np.frexp(a)
    small = a < lowest
    return np.where(small, 0, top + exponent - 1), np.where(small, a / lowest, 2.0 * mantissa - 1.0)


def bucket_norms(values: Any, *, bucket: int, largest: float) -> NDArray[np.float64]:
    """float64[ceil(n / bucket)]: the 2-norm of each bucket, summed in order, in units of a power of two."""
    unit = 1.0 if values.dtype == np.float32 else 2.0 ** min(max(math.frexp(largest)[1], -1000), 1000)
    wide = min(bucket, values.size)
    squares = np.zeros(-(-values.size // wide) * wide)
    squares[: values.size] = (values.astype(np.float64) / unit) ** 2
    norms: NDArray[np.float64] = np.sqrt(squares.reshape(-1, wide).cumsum(axis=1)[:, -1]) * unit
    return norms


def bucket_largest(values: Any, *, bucket: int) -> Any:
    """The largest magnitude of each bucket, in the type of the values; NaN or Inf where one is."""
    return np.maximum.reduceat(np.abs(values), np.arange(0, values.size, bucket))


def worth(top: int, natural: bool) -> NDArray[np.float64]:
    """Returns float64[2·top + 1]: the values of the levels −top … top, in norms."""
    k = np.arange(1, top + 1)
    positive = np.ldexp(1.0, k - top) if natural else k / top
    return np.concatenate((-positive[::-1], [0.0], positive))


def value_of_levels(
    levels: NDArray[np.int16], *, norms: Any, bucket: int, top: int, natural: bool, out: Any, accumulate: bool
) -> None:
    """Fills `out` with the levels' values, computed in float64; `accumulate` adds them."""
    scale = np.repeat(norms.astype(np.float64), bucket)[: levels.size] if norms.size > 1 else np.float64(norms[0])
    values = (scale * worth(top, natural)[levels + np.int32(top)]).astype(out.dtype)
    out[:] = out + values if accumulate else values
