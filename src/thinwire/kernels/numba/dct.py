"""The largest coefficients of the orthonormal DCT-II of a matrix's tiles, which lie where the values of their tile did.

It and its inverse (`inverse_dct`) are products with a basis, row by row and column by column. Rows at the same distance
from a tile's two ends are added and subtracted first, because a cosine is symmetric or antisymmetric about the middle:
that halves the work. Products are added in one fixed order and the basis is rounded from exact integers, so the same
bits come out everywhere. A strip of neighbouring tiles is transformed at once, and each pass adds to four rows, so that
what it reads counts four times. Coefficients are selected while they are in the cache, and are never all in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.kernels.numba.blocktopk import Blocks, Selected, room_for
from thinwire.kernels.numba.cosines import forward_weights, padded
from thinwire.kernels.numba.jit import frozen, jit, magnitude_bits, wide_vectors
from thinwire.kernels.numba.largest import room_to_select, select_largest

_TILES = 2  # side by side in one pass: the longer its rows, the less the loops around them count
_PAD = 16  # values between the rows of a strip, so that a column's do not fall into one set of the cache


def select_coefficients(values: Any, blocks: Blocks, *, residual: Any = None, residual_scale: float = 1.0) -> Selected:
    """The k largest coefficients of every tile, as `select_blocks` selects values.

    Args:
        values: float32[n] or float64[n], finite.
        blocks: the tiles of n values; none is short.
        residual: of the same type and size; becomes v = residual_scale·residual + values, which is transformed.
        residual_scale: what the residual is multiplied by first.

    Example:
        >>> found = select_coefficients(np.array([1.0, 3, 1, 3, 1, 3, 1, 3]), Blocks(4, 2, 4, 2, 2, 8))
        >>> found.places.tolist(), np.round(found.values, 6).tolist()
        ([0, 1], [5.656854, -2.828427])
    """
    kind = np.dtype(values.dtype).str
    down, across = forward_weights(blocks.tile_rows, kind), forward_weights(blocks.tile_columns, kind)
    tile, halves, _ = room(blocks, values.dtype)
    selected = room_for(blocks, values.dtype)
    total = _select(
        frozen(values),
        residual,
        values.dtype.type(residual_scale),
        blocks,
        down,
        across,
        tile,
        halves,
        *room_to_select(blocks.tile_rows * blocks.tile_columns, values.dtype),
        *selected,
    )
    return selected.first(total)


def room(blocks: Blocks, dtype: Any) -> tuple[Any, Any, Any]:
    """Memory to work in: a strip of tiles, its folded halves, and weights of one tile."""
    side = max(blocks.tile_rows, blocks.tile_columns)
    half, wide = padded((side + 1) // 2), _TILES * side + _PAD
    return np.empty((side, wide), dtype), np.empty((2, half, wide), dtype), np.empty((2, half, half), dtype)


@jit
def _select(
    values: Any,
    residual: Any,
    scale: Any,
    blocks: Any,
    down: Any,
    across: Any,
    tile: Any,
    halves: Any,
    held: Any,
    bits: Any,
    histogram: Any,
    found: Any,
    flags: Any,
    counts: Any,
    places: Any,
    sent: Any,
) -> int:
    height, width = blocks.tile_rows, blocks.tile_columns
    size = height * width
    wanted = (blocks.k * size + blocks.block - 1) // blocks.block
    total, index, least = 0, 0, bits.dtype.type(0)
    for top in range(0, blocks.rows, height):
        for left in range(0, blocks.columns, _TILES * width):
            tiles = min(_TILES, (blocks.columns - left) // width)
            first, wide = top * blocks.columns + left, tiles * width
            if residual is None:
                _fold_down(values, first, blocks.columns, height, wide, halves)
            else:
                for start in range(first, first + height * blocks.columns, blocks.columns):
                    _add(residual[start : start + wide], scale, values[start : start + wide])
                _fold_down(residual, first, blocks.columns, height, wide, halves)
            _clear(halves, (height + 1) // 2, down.shape[0], wide)
            _forward(halves, height, wide, down, tile)
            _fold_across(tile, height, width, tiles, halves)
            _clear(halves, (width + 1) // 2, across.shape[0], tiles * height)
            _forward(halves, width, tiles * height, across, tile)
            for each in range(tiles):
                _lay_out(tile, each * height, height, width, held)
                _look(held, bits[0])
                counts[index], least = select_largest(
                    held, bits, size, wanted, least, histogram, found, flags, places[total:], sent[total:]
                )
                total += counts[index]
                index += 1
    return total


@jit
def _add(residual: Any, scale: Any, values: Any) -> None:
    wide_vectors()
    for i in range(values.size):
        residual[i] = scale * residual[i] + values[i]


@jit
def _lay_out(tile: Any, left: int, height: int, width: int, held: Any) -> None:
    """One tile's coefficients, row after row, of a strip whose columns are rows."""
    for row in range(height):
        for column in range(width):
            held[row * width + column] = tile[column, left + row]


@jit
def _look(held: Any, bits: Any) -> None:
    wide_vectors()
    for i in range(held.size):
        bits[i] = magnitude_bits(held[i])


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
