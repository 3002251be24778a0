"""The inverse of a tile's DCT-II, and its subtraction: products in one fixed order, as in `dct`.

Coefficients that are zero, as most are, are skipped, and columns without any.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.kernels.numba.blocktopk import Blocks, Selected
from thinwire.kernels.numba.cosines import UNROLLED, backward_weights, basis
from thinwire.kernels.numba.dct import combine, combine_four, room
from thinwire.kernels.numba.jit import frozen, jit, magnitude_bits, wide_vectors


def invert(values: Any, blocks: Blocks) -> None:
    """Replaces the coefficients of every tile by the values that they stand for.

    Example:
        >>> values = np.array([2.0, 0, 0, 0], np.float32)
        >>> invert(values, Blocks(2, 2, 2, 2, 1, 4))
        >>> np.round(values, 6).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    _invert(
        values, blocks, *_matrices(blocks, values.dtype), *room(blocks, values.dtype), *_found(blocks, values.dtype)
    )


def subtract(residual: Any, blocks: Blocks, selected: Selected, codes: Any, book: Any) -> None:
    """Takes off the residual what the selected coefficients stand for, as they were rounded to ``book[codes]``.

    The bits are those of `invert` and a subtraction, without a look at the coefficients that were not selected.
    """
    kind = residual.dtype
    memory = *_matrices(blocks, kind), *room(blocks, kind), *_found(blocks, kind)
    _subtract(residual, blocks, selected.counts, selected.places, codes, frozen(book), *memory)


def _matrices(blocks: Blocks, dtype: Any) -> tuple[Any, Any]:
    """What the inverse multiplies columns and rows by."""
    kind = np.dtype(dtype).str
    return basis(blocks.tile_rows, kind), backward_weights(blocks.tile_columns, kind)


def _found(blocks: Blocks, dtype: Any) -> tuple[Any, Any]:
    """Room for one tile's coefficients: rows and columns, and values."""
    size = blocks.tile_rows * blocks.tile_columns
    return np.empty((2, size), np.int32), np.empty(size, dtype)


@jit
def _invert(
    values: Any,
    blocks: Any,
    row_basis: Any,
    across: Any,
    tile: Any,
    halves: Any,
    weights: Any,
    places: Any,
    coefficients: Any,
) -> None:
    height, width = blocks.tile_rows, blocks.tile_columns
    for top in range(0, blocks.rows, height):
        for left in range(0, blocks.columns, width):
            first = top * blocks.columns + left
            number = _find(values, first, blocks, places, coefficients)
            evens, odds = _expand(number, height, width, places, coefficients, row_basis, halves, across, weights)
            _backward(halves, height, width, evens, odds, weights, tile)
            for row in range(height):
                start = first + row * blocks.columns
                for column in range(width):
                    values[start + column] = tile[column, row]


@jit
def _subtract(
    residual: Any,
    blocks: Any,
    counts: Any,
    selected: Any,
    codes: Any,
    book: Any,
    row_basis: Any,
    across: Any,
    tile: Any,
    halves: Any,
    weights: Any,
    places: Any,
    coefficients: Any,
) -> None:
    height, width = blocks.tile_rows, blocks.tile_columns
    at, index = 0, 0
    for top in range(0, blocks.rows, height):
        for left in range(0, blocks.columns, width):
            number = counts[index]
            for i in range(number):
                places[0, i] = selected[at + i] // width
                places[1, i] = selected[at + i] - places[0, i] * width
                coefficients[i] = book[codes[at + i]]
            at, index = at + number, index + 1
            evens, odds = _expand(number, height, width, places, coefficients, row_basis, halves, across, weights)
            _backward(halves, height, width, evens, odds, weights, tile)
            for row in range(height):
                start = top * blocks.columns + left + row * blocks.columns
                for column in range(width):
                    residual[start + column] -= tile[column, row]


@jit
def _find(values: Any, first: int, blocks: Any, places: Any, coefficients: Any) -> int:
    """Finds a tile's coefficients that are not zero, row by row; returns how many there are."""
    number, rows, columns, width = 0, places[0], places[1], blocks.tile_columns
    for row in range(blocks.tile_rows):
        start = first + row * blocks.columns
        some = values[start : start + width]
        if _any(some):
            for column in range(width):
                rows[number], columns[number], coefficients[number] = row, column, some[column]
                number += some[column] != 0
    return number


@jit
def _expand(
    number: int,
    height: int,
    width: int,
    places: Any,
    coefficients: Any,
    row_basis: Any,
    halves: Any,
    across: Any,
    weights: Any,
) -> tuple[int, int]:
    """Inverts one tile's columns, of those that hold a coefficient; returns how many of even and of odd number do.

    They go to `halves`, in ascending order, and their weights to `weights`; zeros follow up to a whole `UNROLLED`.
    """
    row_of, column_of, half = places[0], places[1], across.shape[1]
    used = np.zeros(width, np.int32)
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
        column = column_of[i]
        _add_multiple(row_basis[row_of[i]], coefficients[i], halves[column & 1, used[column], :height])
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
def _backward(halves: Any, width: int, height: int, evens: int, odds: int, weights: Any, out: Any) -> None:
    """out = transposed basis · matrix, of `height` rows, from its rows of even and of odd number."""
    half = (height + 1) // 2
    for parity, used, some in ((0, evens, half), (1, odds, height // 2)):
        # Odd ones go to the rows that `_unfold` pairs with the even ones', from the last one up.
        row, at, step = 0, 0 if parity == 0 else height - 1, 1 if parity == 0 else -1
        while row + 4 <= some:
            rows = out[at], out[at + step], out[at + 2 * step], out[at + 3 * step]
            combine_four(halves[parity], weights[parity], used, row, 1, width, rows)
            row += 4
            at += 4 * step
        while row < some:
            combine(halves[parity], weights[parity], used, row, width, out[at])
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
