"""The matrices of the DCT-II: the same bits on every machine, because cosines are rounded from exact integers."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.numba.jit import frozen

UNROLLED = 4  # rows that one pass over an accumulator adds
_ONE = 1 << 192
_PI = 314159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798
_PI_UNIT = 10**101


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
def forward_weights(size: int, dtype: str) -> Any:
    """The transposed basis on the sums and differences of rows: its upper half, and zeros up to a whole `UNROLLED`."""
    half = (size + 1) // 2
    weights = np.zeros((padded(half), size), dtype)
    weights[:half] = _basis(size, dtype)[:, :half].T
    return frozen(weights)


@cache
def backward_weights(size: int, dtype: str) -> Any:
    """The basis on even and on odd coefficients: its left half."""
    half = (size + 1) // 2
    weights = np.zeros((2, half, half), dtype)
    weights[0] = _basis(size, dtype)[0::2, :half]
    weights[1, : size // 2] = _basis(size, dtype)[1::2, :half]
    return frozen(weights)


def padded(half: int) -> int:
    return -(-half // UNROLLED) * UNROLLED
