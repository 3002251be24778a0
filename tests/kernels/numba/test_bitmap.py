"""Positions as bits: the same as `numpy.packbits` and `numpy.flatnonzero`."""

from __future__ import annotations

import numpy as np

from thinwire.kernels.numba.bits import positions_of, set_bits


def test_bits_of_positions() -> None:
    for size in (1, 7, 8, 9, 1000, 100_003):
        for density in (0.0, 0.01, 0.5, 1.0):
            chosen = np.random.default_rng(size).random(size) < density
            bitmap = np.full(-(-size // 8), 255, np.uint8)
            set_bits(np.flatnonzero(chosen), bitmap)
            assert np.array_equal(bitmap, np.packbits(chosen)), (size, density)
            assert np.array_equal(positions_of(bitmap), np.flatnonzero(chosen)), (size, density)
