"""Sums over a tensor, in float64 and in a fixed order, so that every machine and both backends get the same bits.

Float addition is not associative, so compilers do not vectorise a plain sum. A tensor is cut into stretches, which the
programs of a GPU share. Each stretch has 1,024 running sums (value i goes to sum i mod 1,024), which vectorise, and are
folded in halves at its end; the stretches' totals are added in the same way.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from thinwire.kernels.contract import require_finite_magnitude
from thinwire.kernels.numba.jit import frozen, jit, max_magnitude, wide_vectors

LANES = 1024
STRETCH = 128 * LANES


class Moments(NamedTuple):
    """Sums over v; the first three in units of `unit` (its square, for squares), so that none overflows.

    Attributes:
        positive: sum of the values above zero.
        negative: sum of the values below zero (at most 0).
        squares: sum of the squares.
        num_nonnegative: number of values that are at least zero.
        largest: the largest magnitude, without unit.
        unit: a power of two; 1 for float32.
    """

    positive: float
    negative: float
    squares: float
    num_nonnegative: int
    largest: float
    unit: float


def moments(
    values: Any, *, residual: Any = None, residual_scale: float = 1.0, signed: bool = True, squares: bool = True
) -> Moments:
    """Returns the sums over v = values, or residual_scale·residual + values.

    Args:
        values: float32[n] or float64[n].
        residual: of the same type and size; only read.
        residual_scale: factor on the residual.
        signed: False leaves the two signed sums and the count at 0, which is faster.
        squares: False leaves the sum of squares at 0.

    Raises:
        NonFiniteError: NaN or Inf in v.

    Example:
        >>> m = moments(np.array([3.0, -4.0, 0.0], np.float32))
        >>> m.positive, m.negative, m.squares, m.num_nonnegative
        (3.0, -4.0, 25.0, 2)
    """
    kind, unit = values.dtype.type, 1.0
    largest = max_magnitude(values, residual, residual_scale)
    require_finite_magnitude(largest)
    if kind is np.float64:
        unit = 2.0 ** min(max(math.frexp(largest)[1], -1000), 1000)
    positive, negative, of_squares = np.zeros((3, LANES))
    totals = np.zeros((3, -(-values.size // STRETCH)))
    num_nonnegative = _moments(
        frozen(values),
        None if residual is None else frozen(residual),
        kind(residual_scale),
        1.0 / unit,
        positive if signed else None,
        negative if signed else None,
        of_squares if squares else None,
        totals,
    )
    above, below, total = map(_add_up, totals)
    return Moments(above, below, total, num_nonnegative, largest, unit)


@jit
def _moments(
    values: Any, residual: Any, scale: Any, lift: float, positive: Any, negative: Any, squares: Any, totals: Any
) -> int:
    """Fills the stretches' totals; returns the number of values that are at least zero. Skips sums that are None."""
    count = 0
    for stretch in range(totals.shape[1]):
        for first in range(stretch * STRETCH, min((stretch + 1) * STRETCH, values.size), LANES):
            row = values[first : first + LANES]
            held = None if residual is None else residual[first : first + LANES]
            count += _add_row(row, held, scale, lift, positive, negative, squares)
        if positive is not None:
            totals[0, stretch], totals[1, stretch] = _fold(positive), _fold(negative)
        if squares is not None:
            totals[2, stretch] = _fold(squares)
    return count


@jit
def _add_row(row: Any, residual: Any, scale: Any, lift: float, positive: Any, negative: Any, squares: Any) -> Any:
    wide_vectors()
    count = np.int32(0)
    for i in range(row.size):
        v = row[i] if residual is None else scale * residual[i] + row[i]
        w = np.float64(v) * lift
        if positive is not None:
            count = np.int32(count + np.int32(v >= 0))
            positive[i] += w if w > 0 else 0.0
            negative[i] += w if w < 0 else 0.0
        if squares is not None:
            squares[i] += w * w
    return count


@jit
def _fold(lanes: Any) -> Any:
    """Returns the sum of the running sums and sets them to zero."""
    half = lanes.size // 2
    while half >= 1:
        for i in range(half):
            lanes[i] += lanes[half + i]
        half //= 2
    total = lanes[0]
    lanes[:] = 0
    return total


def _add_up(totals: Any) -> float:
    """Adds the stretches' totals, in the same order as the values in a stretch."""
    if totals.size == 1:
        return float(totals[0])
    lanes = np.zeros(LANES)
    for start in range(0, totals.size, LANES):
        row = totals[start : start + LANES]
        lanes[: row.size] += row
    return float(_fold(lanes))
