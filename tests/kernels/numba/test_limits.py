"""The machine's own limits: each loop does the work that it stands for, so that no compiler may drop it."""

from __future__ import annotations

import numpy as np

from thinwire.kernels.numba import limits


def test_each_loop_does_its_work() -> None:
    values = np.arange(1000, dtype=np.float32)
    residual, target = np.full(1000, 2.0, dtype=np.float32), np.zeros(1000, dtype=np.float32)
    limits.two_pass_floor(values, residual)
    assert np.array_equal(residual, (values + 2) / 2)
    limits.copy(values, target)
    assert np.array_equal(target, values)
    limits.read_modify_write(target)
    assert np.array_equal(target, values + 1)
    limits.fill(target)
    assert np.array_equal(target, np.ones(1000))
