"""Stochastic rounding to a few signed levels, even or by powers of two (QSGD §3.1; DoubleSqueeze §3.2).

A magnitude a = |v| / norm between two neighbouring levels goes to the upper one with the probability that makes the
expectation a. Level k of s is worth k / s ("linear") or 2**(k − s), with 0 for k = 0 ("natural").
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import UNIT, Key
from thinwire.kernels.numba.jit import frozen, jit
from thinwire.kernels.numba.stochastic import high_bits

MAX_LEVELS = 1 << 14
MAX_NATURAL_LEVELS = 64
_BLOCK = 1 << 12


def round_to_levels(
    values: Any, *, norms: Any, bucket: int, top: int, natural: bool, key: Key, out: NDArray[np.int16]
) -> None:
    """Fills `out` with signed levels −top … top."""
    random = np.empty(min(_BLOCK, values.size), np.int32)
    kernel = _natural if natural else _linear
    for first in range(0, values.size, _BLOCK):
        part = frozen(values[first : first + _BLOCK])
        high_bits(key, first, random)
        kernel(part, norms, bucket, first, top, UNIT, random, out[first : first + _BLOCK])


def bucket_norms(values: Any, *, bucket: int, largest: float) -> NDArray[np.float64]:
    """float64[ceil(n / bucket)]: the 2-norm of each bucket, summed in order, in units of a power of two."""
    norms = np.empty(-(-values.size // bucket))
    unit = 1.0 if values.dtype == np.float32 else 2.0 ** min(max(math.frexp(largest)[1], -1000), 1000)
    _norms(frozen(values), bucket, unit, norms)
    return norms


def bucket_largest(values: Any, *, bucket: int) -> Any:
    """The largest magnitude of each bucket, in the type of the values; NaN or Inf where one is."""
    return np.maximum.reduceat(np.abs(values), np.arange(0, values.size, bucket))


def worth(top: int, natural: bool) -> NDArray[np.float64]:
    """float64[2·top + 1]: what the levels −top … top are worth, in norms."""
    k = np.arange(1, top + 1)
    positive = np.ldexp(1.0, k - top) if natural else k / top
    return np.concatenate((-positive[::-1], [0.0], positive))


def value_of_levels(
    levels: NDArray[np.int16], *, norms: Any, bucket: int, top: int, natural: bool, out: Any, accumulate: bool
) -> None:
    """``out = norm · worth[level]``, computed in float64; or added."""
    scale = np.repeat(norms.astype(np.float64), bucket)[: levels.size] if norms.size > 1 else np.float64(norms[0])
    values = (scale * worth(top, natural)[levels + np.int32(top)]).astype(out.dtype)
    out[:] = out + values if accumulate else values


@jit
def _norms(values: Any, bucket: int, unit: float, norms: Any) -> None:
    lift = 1.0 / unit  # a power of two: as good as dividing by the unit
    for k in range(norms.size):
        total = 0.0
        for i in range(k * bucket, min(values.size, (k + 1) * bucket)):
            v = np.float64(values[i]) * lift
            total += v * v
        norms[k] = math.sqrt(total) * unit


@jit
def _linear(values: Any, norms: Any, bucket: int, first: int, top: int, unit: float, random: Any, out: Any) -> None:
    for i in range(values.size):
        norm = np.float64(norms[(first + i) // bucket])
        a = abs(np.float64(values[i])) / norm * top if norm > 0.0 else 0.0
        level = int(a)
        level = min(level + int(np.float64(random[i]) * unit < a - level), top)
        out[i] = level if values[i] > 0 else -level


@jit
def _natural(values: Any, norms: Any, bucket: int, first: int, top: int, unit: float, random: Any, out: Any) -> None:
    level: Any
    lowest = 2.0 ** (1 - top)
    for i in range(values.size):
        norm = np.float64(norms[(first + i) // bucket])
        a = abs(np.float64(values[i])) / norm if norm > 0 else 0.0
        if a < lowest:
            level, rest = 0, a / lowest
        else:
            mantissa, exponent = math.frexp(a)
            level, rest = top + exponent - 1, 2.0 * mantissa - 1.0
        level += np.float64(random[i]) * unit < rest
        level = min(level, top)
        out[i] = level if values[i] > 0 else -level
