"""16-bit floats: every bit pattern there is, and every way to round, equal to NumPy's casts."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from tests.kernels import oracle
from thinwire.kernels.numba import max_magnitude
from thinwire.kernels.numba.casts import BFLOAT_MAX, to_bfloat, to_half, widen

ALL = np.arange(1 << 16, dtype=np.uint16)
FINITE = {"half": ALL[(ALL & 0x7C00) != 0x7C00], "bfloat": ALL[(ALL & 0x7F80) != 0x7F80]}
DTYPES: tuple[Any, ...] = (np.float32, np.float64)


def neighbours(values: Any, dtype: Any) -> Any:
    """The values, the middles between them, and what lies one unit in the last place beside all of these."""
    ascending = np.unique(values.astype(dtype))
    middles = ascending[:-1] / 2 + ascending[1:] / 2
    both = np.concatenate([ascending, middles])
    return np.concatenate([both, np.nextafter(both, dtype(np.inf)), np.nextafter(both, dtype(-np.inf))])


def test_half_rounds_as_numpy_does_beside_every_half() -> None:
    for dtype in DTYPES:
        values = neighbours(oracle.widen(FINITE["half"], "half"), dtype)
        values = np.concatenate([values, [-0.0, 0.0, np.finfo(dtype).smallest_subnormal, 65519.996]]).astype(dtype)
        values = values[np.abs(values) < 65520]
        halves = np.empty(values.size, np.uint16)
        assert to_half(values, halves) == np.abs(values).max(), dtype
        assert np.array_equal(halves, oracle.to_half(values)), dtype


def test_bfloat_rounds_half_to_even_beside_every_bfloat() -> None:
    for dtype in DTYPES:
        with np.errstate(over="ignore"):
            values = neighbours(oracle.widen(FINITE["bfloat"], "bfloat"), dtype)
        values = values[np.abs(values) <= BFLOAT_MAX]
        halves = np.empty(values.size, np.uint16)
        assert to_bfloat(values, halves) <= BFLOAT_MAX, dtype
        assert np.array_equal(halves, oracle.to_bfloat(values)), dtype
        limit = np.array([BFLOAT_MAX, np.nextafter(np.float32(BFLOAT_MAX), np.float32(np.inf))], np.float32)
        assert oracle.to_bfloat(limit).tolist() == [0x7F7F, 0x7F80], dtype


def test_any_size() -> None:
    for size, dtype in product((0, 1, 7, 319, 8191, 8192, 8193, 50_001), DTYPES):
        case = size, dtype
        values = np.random.default_rng(size).standard_t(3, size).astype(dtype)
        halves = np.empty(size, np.uint16)
        for cast, kind, reference in ((to_half, "half", oracle.to_half), (to_bfloat, "bfloat", oracle.to_bfloat)):
            assert cast(values, halves) == np.abs(values.astype(np.float32) if kind == "bfloat" else values).max(
                initial=0
            ), case
            assert np.array_equal(halves, reference(values)), case
            for accumulate in (False, True):
                out = np.full(size, 0.25, dtype)
                widen(memoryview(b"?" + halves.tobytes())[1:], kind=kind, out=out, accumulate=accumulate)
                wide = oracle.widen(halves, kind)
                assert out.tobytes() == ((dtype(0.25) + wide) if accumulate else wide).astype(dtype).tobytes(), case
        for offset in (0, 1):
            found = max_magnitude(np.frombuffer(b"?" * offset + values.tobytes(), dtype, offset=offset))
            assert found == np.abs(values).max(initial=0), case


def test_widening_every_finite_pattern_is_exact() -> None:
    for kind in FINITE:
        out = np.empty(FINITE[kind].size, np.float32)
        widen(FINITE[kind].tobytes(), kind=kind, out=out, accumulate=False)
        assert out.tobytes() == oracle.widen(FINITE[kind], kind).tobytes(), kind
