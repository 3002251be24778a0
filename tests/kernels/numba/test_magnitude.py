"""The largest magnitude, NaN and Inf included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from thinwire.kernels import reference
from thinwire.kernels.numba import max_magnitude


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_max_magnitude(dtype: Any) -> None:
    rng = np.random.default_rng(2)
    for size in (0, 1, 5, 64, 1001):
        values = rng.standard_normal(size).astype(dtype)
        assert max_magnitude(values) == reference.max_magnitude(values)
    assert max_magnitude(np.array([-0.0], dtype=dtype)) == 0.0
    assert max_magnitude(np.array([1.0, -np.inf, 2.0], dtype=dtype)) == np.inf
    assert np.isnan(max_magnitude(np.array([1.0, np.nan, np.inf], dtype=dtype)))
