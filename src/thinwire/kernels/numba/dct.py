"""The orthonormal DCT-II of a matrix's tiles, and its inverse: coefficients lie where the values of their tile did.

Both are products with a basis, row by row and column by column. Rows at the same distance from a tile's two ends are
added and subtracted first, because a cosine is symmetric or antisymmetric about the middle: that halves the work.
Products are added in one fixed order and the basis is rounded from exact integers, so the same bits come out
everywhere. The inverse skips coefficients that are zero, as most are, and columns without any. A strip of neighbouring
tiles is transformed at once, and each pass adds to four rows, so that what it reads counts four times.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.kernels.numba.blocktopk import Blocks
from thinwire.kernels.numba.cosines import UNROLLED, backward_weights, basis, forward_weights, padded
from thinwire.kernels.numba.jit import frozen, jit, magnitude_bits, wide_vectors

_TILES = 2  # side by side in one pass: the longer its rows, the less the loops around them count
_PAD = 16  # values between the rows of a strip, so that a column's do not fall into one set of the cache


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
    down, across = forward_weights(blocks.tile_rows, kind), forward_weights(blocks.tile_columns, kind)
    tile, halves, _ = _room(blocks, out.dtype)
    _transform(frozen(values), blocks, down, across, tile, halves, out)


def invert(values: Any, blocks: Blocks) -> None:
    """Replaces the coefficients of every tile by the values that they stand for.

    Example:
        >>> values = np.array([2.0, 0, 0, 0], np.float32)
        >>> invert(values, Blocks(2, 2, 2, 2, 1, 4))
        >>> np.round(values, 6).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    kind = np.dtype(values.dtype).str
    across = backward_weights(blocks.tile_columns, kind)
    places = np.empty((2, blocks.tile_rows * blocks.tile_columns), np.int32)
    _invert(values, blocks, basis(blocks.tile_rows, kind), across, *_room(blocks, values.dtype), places)


def _room(blocks: Blocks, dtype: Any) -> tuple[Any, Any, Any]:
    """Memory to work in: a strip of tiles, its folded halves, and weights of one tile."""
    side = max(blocks.tile_rows, blocks.tile_columns)
    half, wide = padded((side + 1) // 2), _TILES * side + _PAD
    return np.empty((side, wide), dtype), np.empty((2, half, wide), dtype), np.empty((2, half, half), dtype)


@jit
def _transform(values: Any, blocks: Any, down: Any, across: Any, tile: Any, halves: Any, out: Any) -> None:
    height, width = blocks.tile_rows, blocks.tile_columns
    for top in range(0, blocks.rows, height):
        for left in range(0, blocks.columns, _TILES * width):
            tiles = min(_TILES, (blocks.columns - left) // width)
            first = top * blocks.columns + left
            _fold_down(values, first, blocks.columns, height, tiles * width, halves)
            _clear(halves, (height + 1) // 2, down.shape[0], tiles * width)
            _forward(halves, height, tiles * width, down, tile)
            _fold_across(tile, height, width, tiles, halves)
            _clear(halves, (width + 1) // 2, across.shape[0], tiles * height)
            _forward(halves, width, tiles * height, across, tile)
            for row in range(height):
                start = first + row * blocks.columns
                for each in range(tiles):
                    for column in range(width):
                        out[start + each * width + column] = tile[column, each * height + row]


@jit
def _invert(
    values: Any, blocks: Any, row_basis: Any, across: Any, tile: Any, halves: Any, weights: Any, places: Any
) -> None:
    height, width = blocks.tile_rows, blocks.tile_columns
    for top in range(0, blocks.rows, height):
        for left in range(0, blocks.columns, width):
            first = top * blocks.columns + left
            evens, odds = _expand(values, first, blocks, row_basis, halves, across, weights, places)
            _backward(halves, height, width, evens, odds, weights, tile)
            for row in range(height):
                start = first + row * blocks.columns
                for column in range(width):
                    values[start + column] = tile[column, row]


@jit
def _fold_down(values: Any, first: int, stride: int, height: int, width: int, halves: Any) -> None:
    """Sums and differences of the rows at the same distance from both ends of a strip of tiles."""
    wide_vectors()
    for row in range(height // 2):
        start, end = first + row * stride, first + (height - 1 - row) * stride
        upper, lower, sums, differences = values[start:], values[end:], halves[0, row], halves[1, row]
        for column in range(width):
            a, b = upper[column], lower[column]
            sums[column] = a + b
            differences[column] = a - b
    if height % 2:
        start = first + height // 2 * stride
        halves[0, height // 2, :width] = values[start : start + width]
        halves[1, height // 2, :width] = 0


@jit
def _fold_across(matrix: Any, height: int, width: int, tiles: int, halves: Any) -> None:
    """As `_fold_down`, of the columns of each tile, which become rows."""
    for each in range(tiles):
        left = each * width
        for row in range(height):
            at = each * height + row
            for column in range(width // 2):
                a, b = matrix[row, left + column], matrix[row, left + width - 1 - column]
                halves[0, column, at] = a + b
                halves[1, column, at] = a - b
            if width % 2:
                halves[0, width // 2, at] = matrix[row, left + width // 2]
                halves[1, width // 2, at] = 0


@jit
def _clear(halves: Any, begin: int, end: int, width: int) -> None:
    """Zeros in the rows up to a multiple of `UNROLLED`."""
    halves[:, begin:end, :width] = 0


@jit
def _expand(
    values: Any, first: int, blocks: Any, row_basis: Any, halves: Any, across: Any, weights: Any, places: Any
) -> tuple[int, int]:
    """Inverts one tile's columns, of those that hold a coefficient; returns how many of even and of odd number do.

    They go to `halves`, in ascending order, and their weights to `weights`; zeros follow up to a whole `UNROLLED`.
    """
    height, width = blocks.tile_rows, blocks.tile_columns
    number, row_of = 0, places[0]
    column_of, half = places[1], across.shape[1]
    used = np.zeros(width, np.int32)
    for row in range(height):
        start = first + row * blocks.columns
        coefficients = values[start : start + width]
        if _any(coefficients):
            for column in range(width):
                row_of[number], column_of[number] = row, column
                number += coefficients[column] != 0
    for i in range(number):
        used[column_of[i]] = 1
    found = np.zeros(2, np.int64)
    for column in range(width):
        if used[column]:
            parity, at = column & 1, found[column & 1]
            halves[parity, at, :height] = 0
            weights[parity, at, :half] = across[parity, column // 2]
            used[column], found[parity] = at, at + 1
    for i in range(number):
        row, column = row_of[i], column_of[i]
        coefficient = values[first + row * blocks.columns + column]
        _add_multiple(row_basis[row], coefficient, halves[column & 1, used[column], :height])
    for parity in range(2):
        padded = (found[parity] + UNROLLED - 1) // UNROLLED * UNROLLED
        halves[parity, found[parity] : padded, :height] = 0
        weights[parity, found[parity] : padded, :half] = 0
        found[parity] = padded
    return found[0], found[1]


@jit
def _any(values: Any) -> Any:
    """Whether one of the values is not zero: most rows hold none, and looking at each value would take longer."""
    wide_vectors()
    found = magnitude_bits(values[0])
    for i in range(values.size):
        found |= magnitude_bits(values[i])
    return found != 0


@jit
def _add_multiple(values: Any, factor: Any, total: Any) -> None:
    wide_vectors()
    for i in range(values.size):
        total[i] += factor * values[i]


@jit
def _forward(halves: Any, height: int, width: int, weights: Any, out: Any) -> None:
    """out = basis · matrix, of `height` rows, from the matrix's folded halves.

    All rows of one half first: it fits the first-level cache, both do not.
    """
    for parity in range(2):
        row = parity
        while row + 6 < height:
            rows = out[row], out[row + 2], out[row + 4], out[row + 6]
            _combine_four(halves[parity], weights, weights.shape[0], row, 2, width, rows)
            row += 8
        while row < height:
            _combine(halves[parity], weights, weights.shape[0], row, width, out[row])
            row += 2


@jit
def _backward(halves: Any, width: int, height: int, evens: int, odds: int, weights: Any, out: Any) -> None:
    """out = transposed basis · matrix, of `height` rows, from its rows of even and of odd number."""
    half = (height + 1) // 2
    for parity, used, some in ((0, evens, half), (1, odds, height // 2)):
        # Odd ones go to the rows that `_unfold` pairs with the even ones', from the last one up.
        row, at, step = 0, 0 if parity == 0 else height - 1, 1 if parity == 0 else -1
        while row + 4 <= some:
            rows = out[at], out[at + step], out[at + 2 * step], out[at + 3 * step]
            _combine_four(halves[parity], weights[parity], used, row, 1, width, rows)
            row += 4
            at += 4 * step
        while row < some:
            _combine(halves[parity], weights[parity], used, row, width, out[at])
            row += 1
            at += step
    for row in range(height // 2):
        _unfold(out[row], out[height - 1 - row], width)


@jit
def _unfold(even: Any, odd: Any, width: int) -> None:
    wide_vectors()
    for column in range(width):
        a, b = even[column], odd[column]
        even[column] = a + b
        odd[column] = a - b


@jit
def _combine_four(rows: Any, weights: Any, number: int, first: int, step: int, width: int, out: Any) -> None:
    """As `_combine`, for four columns of the weights: what is read counts for all of them."""
    wide_vectors()
    one, two, three, four = out
    one[:width] = 0
    two[:width] = 0
    three[:width] = 0
    four[:width] = 0
    second, third, fourth = first + step, first + 2 * step, first + 3 * step
    for i in range(0, number, 4):
        a, b, c, d = weights[i, first], weights[i + 1, first], weights[i + 2, first], weights[i + 3, first]
        e, f, g, h = weights[i, second], weights[i + 1, second], weights[i + 2, second], weights[i + 3, second]
        p, q, r, s = weights[i, third], weights[i + 1, third], weights[i + 2, third], weights[i + 3, third]
        t, u, v, w = weights[i, fourth], weights[i + 1, fourth], weights[i + 2, fourth], weights[i + 3, fourth]
        for column in range(width):
            k, m, n, o = one[column], two[column], three[column], four[column]
            x = rows[i, column]
            k += a * x
            m += e * x
            n += p * x
            o += t * x
            x = rows[i + 1, column]
            k += b * x
            m += f * x
            n += q * x
            o += u * x
            x = rows[i + 2, column]
            k += c * x
            m += g * x
            n += r * x
            o += v * x
            x = rows[i + 3, column]
            k += d * x
            m += h * x
            n += s * x
            o += w * x
            one[column], two[column], three[column], four[column] = k, m, n, o


@jit
def _combine(rows: Any, weights: Any, number: int, row: int, width: int, out: Any) -> None:
    """out = Σ weights[i, row]·rows[i], from the first to the last of them; they are a whole `UNROLLED`."""
    wide_vectors()
    out[:width] = 0
    for i in range(0, number, 4):
        a, b, c, d = weights[i, row], weights[i + 1, row], weights[i + 2, row], weights[i + 3, row]
        for column in range(width):
            total = out[column]
            total += a * rows[i, column]
            total += b * rows[i + 1, column]
            total += c * rows[i + 2, column]
            total += d * rows[i + 3, column]
            out[column] = total
