"""The orthonormal DCT-II of a matrix's tiles: coefficients lie where the values of their tile did.

It and its inverse (`inverse_dct`) are products with a basis, row by row and column by column. Rows at the same distance
from a tile's two ends are added and subtracted first, because a cosine is symmetric or antisymmetric about the middle:
that halves the work. Products are added in one fixed order and the basis is rounded from exact integers, so the same
bits come out everywhere. A strip of neighbouring tiles is transformed at once, and each pass adds to four rows, so that
what it reads counts four times.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.kernels.numba.blocktopk import Blocks
from thinwire.kernels.numba.cosines import forward_weights, padded
from thinwire.kernels.numba.jit import frozen, jit, wide_vectors

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
    tile, halves, _ = room(blocks, out.dtype)
    _transform(frozen(values), blocks, down, across, tile, halves, out)


def room(blocks: Blocks, dtype: Any) -> tuple[Any, Any, Any]:
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
def _forward(halves: Any, height: int, width: int, weights: Any, out: Any) -> None:
    """out = basis · matrix, of `height` rows, from the matrix's folded halves.

    All rows of one half first: it fits the first-level cache, both do not.
    """
    for parity in range(2):
        row = parity
        while row + 6 < height:
            rows = out[row], out[row + 2], out[row + 4], out[row + 6]
            combine_four(halves[parity], weights, weights.shape[0], row, 2, width, rows)
            row += 8
        while row < height:
            combine(halves[parity], weights, weights.shape[0], row, width, out[row])
            row += 2


@jit
def combine_four(rows: Any, weights: Any, number: int, first: int, step: int, width: int, out: Any) -> None:
    """As `combine`, for four columns of the weights: what is read counts for all of them."""
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
def combine(rows: Any, weights: Any, number: int, row: int, width: int, out: Any) -> None:
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
