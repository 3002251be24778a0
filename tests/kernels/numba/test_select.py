"""Selection by magnitude: the oracle's answer, whatever the sample said."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.kernels import oracle

from thinwire.kernels.numba.select import checked_sample_of, count_from, sample_of, select_from, select_top, take

DTYPES: tuple[Any, ...] = (np.float32, np.float64)
LARGE = 50_000  # past the size up to which everything is partitioned


def heavy(size: int, dtype: Any) -> Any:
    return np.random.default_rng(size).standard_t(2, size).astype(dtype)


CONTENTS: dict[str, Any] = {
    "heavy tails": heavy(LARGE, np.float64),
    "few levels": np.random.default_rng(0).integers(-3, 4, LARGE).astype(np.float64),
    "constant": np.full(LARGE, -2.5),
    "zero": np.zeros(LARGE),
    "mostly zero": np.where(np.arange(LARGE) % 997 == 0, heavy(LARGE, np.float64), 0.0),
    "subnormal": heavy(LARGE, np.float64) * 1e-44,
    "large where nobody samples": np.where(np.arange(LARGE) % 2, 5.0, 1e-3) * np.linspace(1, 2, LARGE),
    "sorted": np.linspace(-1, 2, LARGE),
}


def test_top() -> None:
    for content, dtype, k in product(CONTENTS, DTYPES, (1, 7, 500, 20_000, LARGE - 1, LARGE)):
        values = CONTENTS[content].astype(dtype)
        assert np.array_equal(select_top(values, k), oracle.select_top(values, k)), (content, dtype, k)


def test_a_sample_that_misleads(monkeypatch: pytest.MonkeyPatch) -> None:
    values = heavy(LARGE, np.float32)
    for bound in (0.0, 1e-30, 1e30):
        monkeypatch.setattr("thinwire.kernels.numba.select._likely_bound", lambda values, k, bound=bound: bound)
        assert np.array_equal(select_top(values, 500), oracle.select_top(values, 500))


def test_ties_go_to_the_lower_position() -> None:
    for values, k, chosen in (
        ([3.0, -3.0, 1.0, 2.0], 1, [0]),
        ([3.0, -3.0, 1.0, 2.0], 2, [0, 1]),
        ([3.0, -3.0, 1.0, 2.0], 3, [0, 1, 3]),
        ([0.0, 1.0, 0.0], 3, [1]),
        ([1.0, 2.0, 1.0, 1.0], 3, [0, 1, 2]),
    ):
        assert select_top(np.array(values), k).tolist() == chosen, (values, k)


def test_all_that_reach_a_bound() -> None:
    for dtype, size in product(DTYPES, (1, 65_535, 65_536, 65_537, 140_000)):
        values = heavy(size, dtype)
        count = count_from(values, 1.5)
        wanted = np.flatnonzero(np.abs(values) >= 1.5)
        assert count == wanted.size, (dtype, size)
        assert np.array_equal(select_from(values, 1.5, count), wanted), (dtype, size)


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


def test_a_sample_has_no_value_twice_and_one_from_each_stretch() -> None:
    values = np.arange(10_007)
    sample = sample_of(values, 1000)
    edges = np.arange(1001) * 10_007 // 1000
    assert np.all((edges[:-1] <= sample) & (sample < edges[1:]))
    assert len(set((sample - edges[:-1]).tolist())) > 5, "always the same place of a stretch"
    assert np.array_equal(sample, sample_of(values, 1000))
    assert sample_of(values, 20_000) is values
