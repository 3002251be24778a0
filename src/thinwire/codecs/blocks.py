"""The k largest magnitudes of each block of a tensor, and their values rounded to a few levels.

Blocks are tiles of a matrix, or stretches of neighbouring values. Positions inside a block count along its rows, so
that a block is read as if it were flat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.numba.positions import Blocks

_VALUES_AT_ONCE = 1 << 18


class Selected(NamedTuple):
    """The selected values, block after block, and within a block by ascending position."""

    counts: NDArray[np.int32]
    """The number of values of every block."""
    places: NDArray[np.int32]
    """Positions within the block."""
    values: NDArray[Any]


def select_blocks(values: Any, blocks: Blocks) -> Selected:
    """Selects the k largest magnitudes of every block; of equal ones the lower position. Zeros are left out.

    Args:
        values: float32[n] or float64[n], finite.
        blocks: of n values.

    Example:
        >>> v = np.array([3, -3, 1, 2, 0, 0, 0, -1], np.float32)
        >>> found = select_blocks(v, Blocks(1, 8, 1, 4, 2, 4))
        >>> found.counts.tolist(), found.places.tolist(), found.values.tolist()
        ([2, 1], [0, 1, 3], [3.0, -3.0, -1.0])
    """
    counts, places, chosen = zip(*(_largest(part, blocks) for part in _parts(values, blocks)), strict=True)
    return Selected(np.concatenate(counts), np.concatenate(places), np.concatenate(chosen))


def _parts(values: Any, blocks: Blocks) -> Iterator[Any]:
    """Yields the blocks as rows, some at a time."""
    rows, columns, tile_rows, tile_columns = blocks[:4]
    rest = columns % tile_columns  # not 0 only for a flat tensor
    if rows == 1:
        rows, columns = columns // tile_columns, tile_columns
    at_once = tile_rows * max(1, _VALUES_AT_ONCE // (tile_rows * columns))
    for top in range(0, rows, at_once):
        band = values[top * columns : min(top + at_once, rows) * columns]
        tiles = band.reshape(-1, tile_rows, columns // tile_columns, tile_columns).swapaxes(1, 2)
        yield tiles.reshape(-1, tile_rows * tile_columns)
    if rest:
        yield values[None, -rest:]


def _largest(held: Any, blocks: Blocks) -> Selected:
    """Selects from blocks of one size, each a row."""
    size, magnitudes = held.shape[1], np.abs(held)
    wanted = -(-blocks.k * size // blocks.block)
    least = np.partition(magnitudes, size - wanted, axis=1)[:, size - wanted, None]
    chosen = magnitudes >= np.maximum(least, np.finfo(held.dtype).smallest_subnormal)
    ties = np.flatnonzero(chosen.sum(axis=1) > wanted)
    above, equal = magnitudes[ties] > least[ties], magnitudes[ties] == least[ties]
    chosen[ties] = above | (equal & (np.cumsum(equal, axis=1) <= wanted - above.sum(axis=1, keepdims=True)))
    at = np.flatnonzero(chosen)
    counts = np.bincount(at // size, minlength=len(held))
    return Selected(counts.astype(np.int32), (at % size).astype(np.int32), held.reshape(-1)[at])


def round_to_bins(values: Any, bits: int, codes: NDArray[np.uint8]) -> NDArray[Any]:
    """Fills `codes` with the bin of each value, of 2**bits; returns each bin's decoded value, the mean of its members.

    With 2 bits and more: c = v − mean, σ the standard deviation, and bins of 6σ/2**bits of which bin 2**(bits − 1) has
    its middle at the mean; the outer bins are unbounded. With 1 bit the two bins meet at the mean. With no more values
    than bins, each value has a bin to itself.

    Args:
        values: float32[n] or float64[n], finite.
        bits: 1 … 8.
        codes: uint8[n].

    Example:
        >>> codes = np.empty(5, np.uint8)
        >>> round_to_bins(np.array([1.0, -1.0, 1.5, -1.0, -2.0], np.float32), 2, codes).tolist(), codes.tolist()
        ([0.0, -2.0, -1.0, 1.25], [3, 2, 3, 2, 1])
    """
    num_bins, kind = 1 << bits, values.dtype.type
    if values.size <= num_bins:
        codes[:] = np.arange(values.size)
        exact = np.zeros(num_bins, kind)
        exact[: values.size] = values
        return exact
    unit = 1.0
    if kind is np.float64:  # squares of float64 may overflow
        unit = 2.0 ** min(max(math.frexp(float(np.abs(values).max()))[1], -1000), 1000)
    v = values.astype(np.float64) / unit
    mean = np.add.accumulate(v)[-1] / v.size  # from the first value to the last, as all sums here
    width = 6 * math.sqrt(np.add.accumulate((v - mean) ** 2)[-1] / (v.size - 1)) / num_bins
    if num_bins == 2:
        codes[:] = v >= mean
    elif width > 0:
        with np.errstate(over="ignore"):
            codes[:] = np.clip(np.floor((v - mean) / width + (num_bins / 2 + 0.5)), 0, num_bins - 1)
    else:
        codes[:] = num_bins // 2
    members = np.maximum(1, np.bincount(codes, minlength=num_bins))
    most = float(np.finfo(kind).max)
    means = np.bincount(codes, weights=v, minlength=num_bins) / members
    levels: NDArray[Any] = np.clip(means * unit, -most, most).astype(kind)
    return levels
