"""What reaches a bound is taken out of a tensor and its residual; a checked sample is that of the sum."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from tests.kernels import oracle
from thinwire.kernels.numba.select import sample_of
from thinwire_lab.kernels.select import checked_sample_of, take

DTYPES: tuple[Any, ...] = (np.float32, np.float64)


def heavy(size: int, dtype: Any) -> Any:
    return np.random.default_rng(size).standard_t(2, size).astype(dtype)


def test_taking_out_what_reaches_a_bound() -> None:
    for dtype, size, bound in product(DTYPES, (1, 7, 8, 9, 8191, 8192, 8193, 140_001), (1e-3, 1.5, 40.0)):
        values, held = heavy(size, dtype), heavy(size + 1, dtype)[:-1]
        for residual in (None, held):
            for tau in (None, 0.7):
                v = oracle.with_residual(values, residual, 0.3)
                reaches = np.abs(v) >= dtype(bound)
                left = None if residual is None else residual.copy()
                bitmap = np.full(-(-size // 8), 255, np.uint8)
                options: dict[str, Any] = {"residual": left, "residual_scale": 0.3, "tau": tau, "bitmap": bitmap}
                taken = take(values, bound, room=np.empty(size + 4, dtype), **options)
                assert taken.tobytes() == v[reaches].tobytes(), (dtype, size, bound)
                assert np.array_equal(bitmap, np.packbits(reaches)), (dtype, size, bound)
                if left is not None:
                    rest = np.zeros_like(v) if tau is None else v - np.copysign(dtype(tau), v)
                    assert left.tobytes() == np.where(reaches, rest, v).tobytes(), (dtype, size, bound)


def test_a_checked_sample_tells_what_is_not_finite() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        values, zeros, largest = (
            heavy(70_000, np.float32),
            np.zeros(70_000, np.float32),
            np.full(3, np.finfo(np.float32).max),
        )
        values[65_536] = bad
        assert not checked_sample_of(values, 10)[1], bad
        assert not checked_sample_of(zeros, 10, residual=values)[1], bad
        assert checked_sample_of(largest, 3)[1], bad
        assert not checked_sample_of(largest, 3, residual=largest)[1], bad


def test_a_checked_sample_is_that_of_the_sum() -> None:
    for size in (1, 1000, 99_999, 140_003, 200_000):
        values, residual = heavy(140_003, np.float32), heavy(140_004, np.float32)[:-1]
        v = oracle.with_residual(values, residual, 0.3)
        sample, finite = checked_sample_of(values, size, residual=residual, residual_scale=0.3)
        assert finite, size
        assert np.array_equal(sample, sample_of(v, size)), size
        assert np.array_equal(checked_sample_of(values, size)[0], sample_of(values, size)), size
