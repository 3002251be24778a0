"""Sums over a tensor, in float64 and in a fixed order, so that every machine and every form gets the same bits.

Float addition is not associative, so compilers leave a plain sum alone. Here a tensor is cut in stretches, so that many
programs of a GPU can share it. In each stretch 1,024 running sums stand side by side (value i goes to sum i mod 1,024),
which vectorises, and are folded in halves at its end; what the stretches add up to is added up in the same way. NumPy
can repeat that order. The same pass finds the largest magnitude, and with it NaN and Inf, before anything is changed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from thinwire.kernels.contract import require_finite_magnitude
from thinwire.kernels.numba.jit import frozen, jit, max_magnitude, wide_vectors

LANES = 1024
STRETCH = 128 * LANES
_BLOCK = 4 * LANES


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
    unit, largest = 1.0, 0.0
    magnitude: Any = np.int32(0x7FFFFFFF)
    if kind is np.float64:
        largest = max_magnitude(values, residual, residual_scale)
        unit, magnitude = _unit(largest), None
    sums, rows = np.zeros((3, LANES)), np.empty(_BLOCK, kind)
    totals = np.zeros((3, -(-values.size // STRETCH)))
    bits, num_nonnegative = _moments(
        frozen(values),
        None if residual is None else frozen(residual),
        kind(residual_scale),
        1.0 / unit,
        magnitude,
        rows,
        frozen(rows),
        sums[0] if signed else None,
        sums[1] if signed else None,
        sums[2] if squares else None,
        totals,
    )
    if magnitude is not None:
        largest = float(np.int32(bits).view(np.float32))
        require_finite_magnitude(largest)
    positive, negative, total_squares = (_add_up(total) for total in totals)
    return Moments(positive, negative, total_squares, num_nonnegative if signed else 0, largest, unit)


def _unit(largest: float) -> float:
    """A power of two near the largest magnitude, whose inverse is finite."""
    require_finite_magnitude(largest)
    return 2.0 ** min(max(math.frexp(largest)[1], -1000), 1000)


@jit
def _moments(
    values: Any,
    residual: Any,
    scale: Any,
    lift: float,
    magnitude: Any,
    rows: Any,
    padded: Any,
    positive: Any,
    negative: Any,
    squares: Any,
    totals: Any,
) -> tuple[Any, int]:
    """Fills the stretches' totals; returns the bits of the largest magnitude, and how many values are at least zero.

    `padded` is `rows`, read-only as `values` are, so that `_add_rows` is compiled once for both.
    """
    largest, num_nonnegative = np.int32(0), 0
    for stretch in range(totals.shape[1]):
        first, end = stretch * STRETCH, min((stretch + 1) * STRETCH, values.size)
        given, held = values[first:end], None if residual is None else residual[first:end]
        found, count = _add(given, held, scale, lift, magnitude, rows, padded, positive, negative, squares)
        largest, num_nonnegative = max(largest, found), num_nonnegative + count
        if positive is not None:
            totals[0, stretch], totals[1, stretch] = _fold(positive), _fold(negative)
        if squares is not None:
            totals[2, stretch] = _fold(squares)
    return largest, num_nonnegative


@jit
def _add(
    values: Any,
    residual: Any,
    scale: Any,
    lift: float,
    magnitude: Any,
    rows: Any,
    padded: Any,
    positive: Any,
    negative: Any,
    squares: Any,
) -> tuple[Any, int]:
    """Adds a stretch to the running sums; returns as `_moments`."""
    largest, num_nonnegative = np.int32(0), 0
    whole = values.size // _BLOCK * _BLOCK
    for start in range(0, whole, _BLOCK):
        if residual is None:
            found, count = _add_rows(values[start : start + _BLOCK], lift, magnitude, positive, negative, squares)
            largest, num_nonnegative = max(largest, found), num_nonnegative + count
        else:
            for first in range(start, start + _BLOCK, LANES):
                block, held = values[first : first + LANES], residual[first : first + LANES]
                found, count = _add_row(block, held, scale, lift, magnitude, positive, negative, squares)
                largest, num_nonnegative = max(largest, found), num_nonnegative + count
    if whole < values.size:
        # Zeros change no sum: v = 0 adds +0.0, and no sum is -0.0.
        _pad(values[whole:], None if residual is None else residual[whole:], scale, rows)
        found, count = _add_rows(padded, lift, magnitude, positive, negative, squares)
        largest = max(largest, found)
        num_nonnegative += count - (_BLOCK - (values.size - whole))
    return largest, num_nonnegative


@jit
def _add_rows(block: Any, lift: float, magnitude: Any, positive: Any, negative: Any, squares: Any) -> tuple[Any, Any]:
    """Four rows at once, so that a running sum is loaded and stored once for four additions to it.

    What is None is left out when this is compiled: the signed sums, the squares, the largest magnitude.
    """
    wide_vectors()
    largest, count = np.int32(0), np.int32(0)
    a, b, c, d = block[:LANES], block[LANES : 2 * LANES], block[2 * LANES : 3 * LANES], block[3 * LANES :]
    for i in range(LANES):
        v0, v1, v2, v3 = a[i], b[i], c[i], d[i]
        if magnitude is not None:
            # The bits of a float32: Numba reads them only where the type is spelled out.
            m0, m1 = np.float32(v0).view(np.int32) & magnitude, np.float32(v1).view(np.int32) & magnitude
            m2, m3 = np.float32(v2).view(np.int32) & magnitude, np.float32(v3).view(np.int32) & magnitude
            largest = max(largest, max(max(m0, m1), max(m2, m3)))
        w0, w1, w2, w3 = np.float64(v0) * lift, np.float64(v1) * lift, np.float64(v2) * lift, np.float64(v3) * lift
        if positive is not None:
            count = np.int32(count + np.int32(v0 >= 0) + np.int32(v1 >= 0) + np.int32(v2 >= 0) + np.int32(v3 >= 0))
            above, below = positive[i], negative[i]
            above += w0 if w0 > 0 else 0.0
            below += w0 if w0 < 0 else 0.0
            above += w1 if w1 > 0 else 0.0
            below += w1 if w1 < 0 else 0.0
            above += w2 if w2 > 0 else 0.0
            below += w2 if w2 < 0 else 0.0
            above += w3 if w3 > 0 else 0.0
            below += w3 if w3 < 0 else 0.0
            positive[i], negative[i] = above, below
        if squares is not None:
            total = squares[i]
            total += w0 * w0
            total += w1 * w1
            total += w2 * w2
            total += w3 * w3
            squares[i] = total
    return largest, count


@jit
def _add_row(
    row: Any, residual: Any, scale: Any, lift: float, magnitude: Any, positive: Any, negative: Any, squares: Any
) -> tuple[Any, Any]:
    """One row with its residual: eight places of memory at a time, as four rows would have, are slower to read."""
    wide_vectors()
    largest, count = np.int32(0), np.int32(0)
    for i in range(LANES):
        v = scale * residual[i] + row[i]
        if magnitude is not None:
            largest = max(largest, np.float32(v).view(np.int32) & magnitude)
        w = np.float64(v) * lift
        if positive is not None:
            count = np.int32(count + np.int32(v >= 0))
            positive[i] += w if w > 0 else 0.0
            negative[i] += w if w < 0 else 0.0
        if squares is not None:
            squares[i] += w * w
    return largest, count


@jit
def _pad(values: Any, residual: Any, scale: Any, rows: Any) -> None:
    """The last values, with their residual, and zeros behind them."""
    for i in range(values.size):
        rows[i] = values[i] if residual is None else scale * residual[i] + values[i]
    rows[values.size :] = 0


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
    """Adds up what stretches add up to, as their values were."""
    if totals.size == 1:
        return float(totals[0])
    lanes = np.zeros(LANES)
    for start in range(0, totals.size, LANES):
        row = totals[start : start + LANES]
        lanes[: row.size] += row
    return float(_fold(lanes))
