"""The largest magnitude of values, or of their sum with a residual, NaN and Inf included."""

from __future__ import annotations

import numpy as np

from tests.kernels import oracle
from thinwire.kernels.numba import max_magnitude


def test_max_magnitude() -> None:
    rng = np.random.default_rng(2)
    for dtype in (np.float32, np.float64):
        for size in (0, 1, 5, 64, 1001):
            values, residual = rng.standard_normal((2, size)).astype(dtype)
            assert max_magnitude(values) == oracle.max_magnitude(values), (dtype, size)
            v = oracle.with_residual(values, residual, 0.3)
            assert max_magnitude(values, residual, 0.3) == oracle.max_magnitude(v), (dtype, size)
        assert max_magnitude(np.array([-0.0], dtype=dtype)) == 0.0
        assert max_magnitude(np.array([1.0, -np.inf, 2.0], dtype=dtype)) == np.inf
        assert np.isnan(max_magnitude(np.array([1.0, np.nan, np.inf], dtype=dtype)))
        assert not np.isfinite(max_magnitude(np.ones(3, dtype), np.array([0, np.nan, 0], dtype)))
