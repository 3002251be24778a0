"""Selection by magnitude: the oracle's answer, whatever the sample said."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.kernels import oracle
from thinwire.kernels.numba.select import count_from, select_from, select_top

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
