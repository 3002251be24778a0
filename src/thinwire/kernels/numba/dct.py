"""The orthonormal DCT-II of a matrix's tiles, and its inverse: coefficients lie where the values of their tile did.

Both are products with a basis, row by row and column by column. Rows at the same distance from a tile's two ends are
added and subtracted first, because a cosine is symmetric or antisymmetric about the middle: that halves the work.
Products are added in one fixed order and the basis is rounded from exact integers, so the same bits come out
everywhere. The inverse skips coefficients that are zero, as most are.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.numba.blocktopk import Blocks
from thinwire.kernels.numba.jit import frozen, jit, wide_vectors

_UNROLLED = 8  # rows that one pass over an accumulator adds
_ONE = 1 << 192
_PI = 314159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798
_PI_UNIT = 10**101


def transform(values: Any, blocks: Blocks, out: Any) -> None:
    """Fills `out` with the coefficients of every tile.

    Args:
        values: float32[n] or float64[n].
        blocks: the tiles of n values; none is short.
        out: of the same type and size; may be `values` itself.

    Example:
        >>> found = np.empty(8)
        >>> transform(np.array([1.0, 3, 1, 3, 1, 3, 1, 3]), Blocks(4, 2, 4, 2, 1, 8), found)
        >>> np.round(found, 6).tolist()
        [5.656854, -2.828427, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    _transform(frozen(values), blocks, *_bases(blocks, out.dtype), *_room(blocks, out.dtype), out)


def invert(values: Any, blocks: Blocks) -> None:
    """Replaces the coefficients of every tile by the values that they stand for.

    Example:
        >>> values = np.array([2.0, 0, 0, 0], np.float32)
        >>> invert(values, Blocks(2, 2, 2, 2, 1, 4))
        >>> np.round(values, 6).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    _invert(values, blocks, *_bases(blocks, values.dtype), *_room(blocks, values.dtype))


def basis(size: int, dtype: Any) -> NDArray[Any]:
    """Returns the orthonormal DCT-II: row i is √(2/n)·cos(π(2r + 1)i/2n), and √(1/n) where i is 0.

    >>> np.round(basis(2, np.float64), 6).tolist()
    [[0.707107, 0.707107], [0.707107, -0.707107]]
    """
    return _basis(size, np.dtype(dtype).str)


@cache
def _basis(size: int, dtype: str) -> NDArray[Any]:
    cosines = [_cosine(m, size) for m in range(size)] + [0.0]  # of π·m/2n

    def at(m: int) -> float:
        m %= 4 * size
        m = min(m, 4 * size - m)
        return cosines[m] if m <= size else -cosines[2 * size - m]

    scale = math.sqrt(2 / size)
    rows = [[math.sqrt(1 / size)] * size, *([scale * at((2 * r + 1) * i) for r in range(size)] for i in range(1, size))]
    return frozen(np.array(rows, dtype))  # type: ignore[no-any-return]


def _cosine(m: int, size: int) -> float:
    """cos(π·m/2·size), correctly rounded: its series in integers. A library's cosine differs between machines."""
    angle = _ONE * _PI * m // (2 * size * _PI_UNIT)
    square, term, total, n = angle * angle // _ONE, _ONE, 0, 0
    while term:
        total += term
        n += 2
        term = -(term * square // (_ONE * n * (n - 1)))
    return total / _ONE


def _bases(blocks: Blocks, dtype: Any) -> tuple[Any, Any]:
    return basis(blocks.tile_rows, dtype), basis(blocks.tile_columns, dtype)


def _room(blocks: Blocks, dtype: Any) -> tuple[Any, Any, Any]:
    """Memory to work in: a tile, twice; and its folded halves, padded with rows of zeros."""
    side = max(blocks.tile_rows, blocks.tile_columns)
    half = -(-((side + 1) // 2) // _UNROLLED) * _UNROLLED
    return np.empty((side, side), dtype), np.empty((side, side), dtype), np.zeros((2, half, side), dtype)


@jit
def _transform(
    values: Any, blocks: Any, row_basis: Any, column_basis: Any, tile: Any, other: Any, halves: Any, out: Any
) -> None:
    height, width = blocks.tile_rows, blocks.tile_columns
    for top in range(0, blocks.rows, height):
        for left in range(0, blocks.columns, width):
            first = top * blocks.columns + left
            for row in range(height):
                start = first + row * blocks.columns
                tile[row, :width] = values[start : start + width]
            _forward(tile, height, width, row_basis, halves, other)
            _turn(other, height, width, tile)
            _forward(tile, width, height, column_basis, halves, other)
            for row in range(height):
                start = first + row * blocks.columns
                for column in range(width):
                    out[start + column] = other[column, row]


@jit
def _invert(values: Any, blocks: Any, row_basis: Any, column_basis: Any, tile: Any, other: Any, halves: Any) -> None:
    height, width = blocks.tile_rows, blocks.tile_columns
    for top in range(0, blocks.rows, height):
        for left in range(0, blocks.columns, width):
            first = top * blocks.columns + left
            tile[:width, :height] = 0
            for row in range(height):
                start = first + row * blocks.columns
                for column in range(width):
                    coefficient = values[start + column]
                    if coefficient != 0:
                        _add_multiple(row_basis[row], coefficient, tile[column, :height])
            _backward(tile, width, height, column_basis, halves, other)
            for row in range(height):
                start = first + row * blocks.columns
                for column in range(width):
                    values[start + column] = other[column, row]


@jit
def _add_multiple(values: Any, factor: Any, total: Any) -> None:
    wide_vectors()
    for i in range(values.size):
        total[i] += factor * values[i]


@jit
def _turn(matrix: Any, height: int, width: int, out: Any) -> None:
    for row in range(width):
        for column in range(height):
            out[row, column] = matrix[column, row]


@jit
def _forward(matrix: Any, height: int, width: int, basis: Any, halves: Any, out: Any) -> None:
    """out = basis · matrix, of `height` rows."""
    wide_vectors()
    half = (height + 1) // 2
    padded = (half + 7) // 8 * 8
    for row in range(half):
        last = height - 1 - row
        for column in range(width):
            if row == last:
                halves[0, row, column] = matrix[row, column]
                halves[1, row, column] = 0
            else:
                halves[0, row, column] = matrix[row, column] + matrix[last, column]
                halves[1, row, column] = matrix[row, column] - matrix[last, column]
    halves[:, half:padded, :width] = 0
    weights = np.zeros(padded, matrix.dtype)
    for row in range(height):
        weights[:half] = basis[row, :half]
        _combine(halves[row & 1], weights, width, out[row])


@jit
def _backward(matrix: Any, height: int, width: int, basis: Any, halves: Any, out: Any) -> None:
    """out = transposed basis · matrix, of `height` rows."""
    wide_vectors()
    evens, odds = (height + 1) // 2, height // 2
    padded = (evens + 7) // 8 * 8
    halves[:, :padded, :width] = 0
    for row in range(height):
        halves[row & 1, row // 2, :width] = matrix[row, :width]
    weights = np.zeros((2, padded), matrix.dtype)
    for row in range(evens):
        for i in range(evens):
            weights[0, i] = basis[2 * i, row]
        for i in range(odds):
            weights[1, i] = basis[2 * i + 1, row]
        last = height - 1 - row
        _combine(halves[0], weights[0], width, out[row])
        if row != last:
            _combine(halves[1], weights[1], width, out[last])
            for column in range(width):
                even, odd = out[row, column], out[last, column]
                out[row, column] = even + odd
                out[last, column] = even - odd


@jit
def _combine(rows: Any, weights: Any, width: int, out: Any) -> None:
    """out = Σ weights[i]·rows[i], from the first to the last; there are a multiple of eight."""
    wide_vectors()
    out[:width] = 0
    for i in range(0, weights.size, 8):
        a, b, c, d = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        e, f, g, h = weights[i + 4], weights[i + 5], weights[i + 6], weights[i + 7]
        for column in range(width):
            total = out[column]
            total += a * rows[i, column]
            total += b * rows[i + 1, column]
            total += c * rows[i + 2, column]
            total += d * rows[i + 3, column]
            total += e * rows[i + 4, column]
            total += f * rows[i + 5, column]
            total += g * rows[i + 6, column]
            total += h * rows[i + 7, column]
            out[column] = total
