"""The orthonormal DCT-II of a matrix's tiles, and its inverse: coefficients lie where the values of their tile did.

Both are products with a basis, row by row and column by column. Rows at the same distance from a tile's two ends are
added and subtracted first, because a cosine is symmetric or antisymmetric about the middle: that halves the work.
Products are added in one fixed order and the basis is rounded from exact integers, so the same bits come out
everywhere. The inverse skips coefficients that are zero, as most are. A strip of neighbouring tiles goes through at
once, and each pass adds to two rows, so that what it reads counts twice.
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
_TILES = 2  # side by side in one pass: the longer its rows, the less the loops around them count
_PAD = 16  # values between the rows of a strip, so that a column's do not fall into one set of the cache
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
    kind = np.dtype(out.dtype).str
    down, across = _forward_weights(blocks.tile_rows, kind), _forward_weights(blocks.tile_columns, kind)
    _transform(frozen(values), blocks, down, across, *_room(blocks, out.dtype), out)


def invert(values: Any, blocks: Blocks) -> None:
    """Replaces the coefficients of every tile by the values that they stand for.

    Example:
        >>> values = np.array([2.0, 0, 0, 0], np.float32)
        >>> invert(values, Blocks(2, 2, 2, 2, 1, 4))
        >>> np.round(values, 6).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    kind = np.dtype(values.dtype).str
    across = _backward_weights(blocks.tile_columns, kind)
    _invert(values, blocks, _basis(blocks.tile_rows, kind), across, *_room(blocks, values.dtype))


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


@cache
def _forward_weights(size: int, dtype: str) -> Any:
    """The basis on the sums and differences of rows: its left half, and zeros up to a multiple of `_UNROLLED`."""
    half = (size + 1) // 2
    weights = np.zeros((size, -(-half // _UNROLLED) * _UNROLLED), dtype)
    weights[:, :half] = _basis(size, dtype)[:, :half]
    return frozen(weights)


@cache
def _backward_weights(size: int, dtype: str) -> Any:
    """The transposed basis on even and on odd coefficients: its upper half, and zeros."""
    evens, odds = (size + 1) // 2, size // 2
    weights = np.zeros((2, evens, -(-evens // _UNROLLED) * _UNROLLED), dtype)
    weights[0, :, :evens] = _basis(size, dtype)[0::2, :evens].T
    weights[1, :, :odds] = _basis(size, dtype)[1::2, :evens].T
    return frozen(weights)


def _room(blocks: Blocks, dtype: Any) -> tuple[Any, Any, Any]:
    """Memory to work in: a strip of tiles, twice; and its folded halves, padded with rows of zeros."""
    side = max(blocks.tile_rows, blocks.tile_columns)
    half = -(-((side + 1) // 2) // _UNROLLED) * _UNROLLED
    wide = _TILES * side + _PAD
    return np.empty((side, wide), dtype), np.empty((side, wide), dtype), np.zeros((2, half, wide), dtype)


@jit
def _transform(values: Any, blocks: Any, down: Any, across: Any, tile: Any, other: Any, halves: Any, out: Any) -> None:
    height, width = blocks.tile_rows, blocks.tile_columns
    for top in range(0, blocks.rows, height):
        for left in range(0, blocks.columns, _TILES * width):
            tiles = min(_TILES, (blocks.columns - left) // width)
            first = top * blocks.columns + left
            for row in range(height):
                start = first + row * blocks.columns
                tile[row, : tiles * width] = values[start : start + tiles * width]
            _forward(tile, height, tiles * width, down, halves, other)
            for each in range(tiles):
                for row in range(height):
                    for column in range(width):
                        tile[column, each * height + row] = other[row, each * width + column]
            _forward(tile, width, tiles * height, across, halves, other)
            for row in range(height):
                start = first + row * blocks.columns
                for each in range(tiles):
                    for column in range(width):
                        out[start + each * width + column] = other[column, each * height + row]


@jit
def _invert(values: Any, blocks: Any, row_basis: Any, across: Any, tile: Any, other: Any, halves: Any) -> None:
    height, width = blocks.tile_rows, blocks.tile_columns
    for top in range(0, blocks.rows, height):
        for left in range(0, blocks.columns, _TILES * width):
            tiles = min(_TILES, (blocks.columns - left) // width)
            first = top * blocks.columns + left
            tile[:width, : tiles * height] = 0
            for row in range(height):
                start = first + row * blocks.columns
                for each in range(tiles):
                    at, end = each * height, (each + 1) * height
                    for column in range(width):
                        coefficient = values[start + each * width + column]
                        if coefficient != 0:
                            _add_multiple(row_basis[row], coefficient, tile[column, at:end])
            _backward(tile, width, tiles * height, across, halves, other)
            for row in range(height):
                start = first + row * blocks.columns
                for each in range(tiles):
                    for column in range(width):
                        values[start + each * width + column] = other[column, each * height + row]


@jit
def _add_multiple(values: Any, factor: Any, total: Any) -> None:
    wide_vectors()
    for i in range(values.size):
        total[i] += factor * values[i]


@jit
def _forward(matrix: Any, height: int, width: int, weights: Any, halves: Any, out: Any) -> None:
    """out = basis · matrix, of `height` rows; every second pair of rows comes with the pair before it."""
    wide_vectors()
    half = (height + 1) // 2
    for row in range(half):
        last = height - 1 - row
        for column in range(width):
            if row == last:
                halves[0, row, column] = matrix[row, column]
                halves[1, row, column] = 0
            else:
                halves[0, row, column] = matrix[row, column] + matrix[last, column]
                halves[1, row, column] = matrix[row, column] - matrix[last, column]
    halves[:, half : weights.shape[1], :width] = 0
    for row in range(height):
        if row % 4 < 2 and row + 2 < height:
            _combine_two(halves[row & 1], weights[row], weights[row + 2], width, out[row], out[row + 2])
        elif row % 4 < 2:
            _combine(halves[row & 1], weights[row], width, out[row])


@jit
def _backward(matrix: Any, height: int, width: int, weights: Any, halves: Any, out: Any) -> None:
    """out = transposed basis · matrix, of `height` rows."""
    wide_vectors()
    evens = (height + 1) // 2
    halves[:, height // 2 : weights.shape[2], :width] = 0
    for row in range(height):
        halves[row & 1, row // 2, :width] = matrix[row, :width]
    row = 0
    while row < evens:
        last = height - 1 - row
        if row + 1 < last - 1:  # both have a partner, and none is the middle
            _combine_two(halves[0], weights[0, row], weights[0, row + 1], width, out[row], out[row + 1])
            _combine_two(halves[1], weights[1, row], weights[1, row + 1], width, out[last], out[last - 1])
            _unfold(out[row], out[last], width)
            _unfold(out[row + 1], out[last - 1], width)
            row += 2
        else:
            _combine(halves[0], weights[0, row], width, out[row])
            if row != last:
                _combine(halves[1], weights[1, row], width, out[last])
                _unfold(out[row], out[last], width)
            row += 1


@jit
def _unfold(even: Any, odd: Any, width: int) -> None:
    wide_vectors()
    for column in range(width):
        a, b = even[column], odd[column]
        even[column] = a + b
        odd[column] = a - b


@jit
def _combine_two(rows: Any, weights: Any, others: Any, width: int, out: Any, second: Any) -> None:
    """As `_combine`, twice: what is read counts for both."""
    wide_vectors()
    out[:width] = 0
    second[:width] = 0
    for i in range(0, weights.size, 8):
        a, b, c, d = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        e, f, g, h = weights[i + 4], weights[i + 5], weights[i + 6], weights[i + 7]
        p, q, r, s = others[i], others[i + 1], others[i + 2], others[i + 3]
        t, u, v, w = others[i + 4], others[i + 5], others[i + 6], others[i + 7]
        for column in range(width):
            one, two = out[column], second[column]
            x = rows[i, column]
            one += a * x
            two += p * x
            x = rows[i + 1, column]
            one += b * x
            two += q * x
            x = rows[i + 2, column]
            one += c * x
            two += r * x
            x = rows[i + 3, column]
            one += d * x
            two += s * x
            x = rows[i + 4, column]
            one += e * x
            two += t * x
            x = rows[i + 5, column]
            one += f * x
            two += u * x
            x = rows[i + 6, column]
            one += g * x
            two += v * x
            x = rows[i + 7, column]
            one += h * x
            two += w * x
            out[column], second[column] = one, two


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
