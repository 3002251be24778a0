"""Sums over a tensor, in float64 and in a fixed order, so that every machine and every form gets the same bits.

Float addition is not associative, so compilers leave a plain sum alone. Here 1,024 running sums stand side by side
(value i goes to sum i mod 1,024), which vectorises, and are folded in halves at the end: an order that NumPy can
repeat. The same pass finds the largest magnitude, and with it NaN and Inf, before anything is changed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from thinwire.errors import NonFiniteError
from thinwire.kernels.jit import jit
from thinwire.kernels.magnitude import frozen, max_magnitude, max_of_sum

LANES = 1024
_INTEGER: dict[Any, Any] = {
    np.float32: (np.int32, np.int32(0x7FFFFFFF)),
    np.float64: (np.int64, np.int64(0x7FFFFFFFFFFFFFFF)),
}
"""The integer type as wide as a float type, and the bits of its magnitude."""


class Moments(NamedTuple):
    """Sums over v; the first three in units of `unit` (its square, for squares), so that none overflows.

    Attributes:
        positive: sum of the values above zero.
        negative: sum of the values below zero (at most 0).
        squares: sum of the squares.
        num_nonnegative: how many values are at least zero.
        largest: the largest magnitude, not in units.
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
        residual_scale: what the residual is multiplied by.
        signed: False leaves the two signed sums and the count at 0, which is quicker.
        squares: False leaves the sum of squares at 0.

    Raises:
        NonFiniteError: NaN or Inf in v.

    Example:
        >>> m = moments(np.array([3.0, -4.0, 0.0], np.float32))
        >>> m.positive, m.negative, m.squares, m.num_nonnegative
        (3.0, -4.0, 25.0, 2)
    """
    kind = values.dtype.type
    unit = 1.0
    if kind is np.float64:
        unit = _unit(largest_of(values, residual, residual_scale))
    integer, magnitude = _INTEGER[kind]
    row = np.empty(LANES, kind)
    largest_bits, num_nonnegative, positive, negative, total_squares = _moments(
        frozen(values),
        frozen(values if residual is None else residual),
        kind(residual_scale),
        residual is not None,
        signed,
        squares,
        1.0 / unit,
        magnitude,
        row,
        row.view(integer),
        np.zeros((3, LANES)),
    )
    largest = float(integer(largest_bits).view(kind))
    require_finite_magnitude(largest)
    return Moments(positive, negative, total_squares, num_nonnegative, largest, unit)


def largest_of(values: Any, residual: Any, residual_scale: float) -> float:
    """The largest magnitude of values, or of residual_scale·residual + values."""
    if residual is None:
        return max_magnitude(values)
    return float(max_of_sum(residual, values.dtype.type(residual_scale), frozen(values)))


def require_finite_magnitude(largest: float) -> None:
    """Raises NonFiniteError where a largest magnitude is NaN or Inf."""
    if not math.isfinite(largest):
        raise NonFiniteError(
            "the values (with their residual) hold NaN or Inf; nothing was changed: skip this step or mend the loss"
        )


def _unit(largest: float) -> float:
    """A power of two near the largest magnitude, whose inverse is finite."""
    require_finite_magnitude(largest)
    return 2.0 ** min(max(math.frexp(largest)[1], -1000), 1000)


@jit
def _moments(
    values: Any,
    residual: Any,
    scale: Any,
    with_residual: bool,
    signed: bool,
    squares: bool,
    lift: Any,
    magnitude: Any,
    row: Any,
    bits: Any,
    lanes: Any,
) -> tuple[Any, int, float, float, float]:
    largest, num_nonnegative = bits[0] & 0, 0
    for start in range(0, values.size, row.size):
        size = min(row.size, values.size - start)
        if with_residual:
            _sum(values[start : start + size], residual[start : start + size], scale, row)
        else:
            _copy(values[start : start + size], row)
        largest = max(largest, _largest(bits[:size], magnitude))
        if signed:
            num_nonnegative += _count_nonnegative(row[:size])
            _add_signed(row[:size], lift, lanes[0], lanes[1])
        if squares:
            _add_squares(row[:size], lift, lanes[2])
    return largest, num_nonnegative, _fold(lanes[0]), _fold(lanes[1]), _fold(lanes[2])


@jit
def _fold(lane: Any) -> Any:
    half = lane.size // 2
    while half >= 1:
        for i in range(half):
            lane[i] += lane[half + i]
        half //= 2
    return lane[0]


@jit
def _copy(values: Any, row: Any) -> None:
    for i in range(values.size):
        row[i] = values[i]


@jit
def _sum(values: Any, residual: Any, scale: Any, row: Any) -> None:
    for i in range(values.size):
        row[i] = scale * residual[i] + values[i]


@jit
def _largest(bits: Any, magnitude: Any) -> Any:
    largest = bits[0] & 0
    for i in range(bits.size):
        largest = max(largest, bits[i] & magnitude)
    return largest


@jit
def _count_nonnegative(row: Any) -> Any:
    count = np.int32(0)
    for i in range(row.size):
        count += np.int32(row[i] >= 0)
    return count


@jit
def _add_signed(row: Any, lift: Any, positive: Any, negative: Any) -> None:
    for i in range(row.size):
        v = np.float64(row[i]) * lift
        positive[i] += v if v > 0 else 0.0
        negative[i] += v if v < 0 else 0.0


@jit
def _add_squares(row: Any, lift: Any, squares: Any) -> None:
    for i in range(row.size):
        v = np.float64(row[i]) * lift
        squares[i] += v * v
