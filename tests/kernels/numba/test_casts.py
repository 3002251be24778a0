"""16-bit floats: every bit pattern there is, and every way to round, equal to NumPy's casts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from thinwire.errors import FrameError
from thinwire.kernels import plain
from thinwire.kernels.numba.casts import BFLOAT_MAX, largest_float, to_bfloat, to_half, upper_halves, widen

ALL = np.arange(1 << 16, dtype=np.uint16)
FINITE = {"half": ALL[(ALL & 0x7C00) != 0x7C00], "bfloat": ALL[(ALL & 0x7F80) != 0x7F80]}


def neighbours(values: Any, dtype: Any) -> Any:
    """The values, the middles between them, and what lies one unit in the last place beside all of these."""
    ascending = np.unique(values.astype(dtype))
    middles = ascending[:-1] / 2 + ascending[1:] / 2
    both = np.concatenate([ascending, middles])
    return np.concatenate([both, np.nextafter(both, dtype(np.inf)), np.nextafter(both, dtype(-np.inf))])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_half_rounds_as_numpy_does_beside_every_half(dtype: Any) -> None:
    values = neighbours(plain.widen(FINITE["half"], "half"), dtype)
    values = np.concatenate([values, [-0.0, 0.0, np.finfo(dtype).smallest_subnormal, 65519.996]]).astype(dtype)
    values = values[np.abs(values) < 65520]
    halves = np.empty(values.size, np.uint16)
    assert to_half(values, halves) == np.abs(values).max()
    assert np.array_equal(halves, plain.to_half(values))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bfloat_rounds_half_to_even_beside_every_bfloat(dtype: Any) -> None:
    with np.errstate(over="ignore"):
        values = neighbours(plain.widen(FINITE["bfloat"], "bfloat"), dtype)
    values = values[np.abs(values) <= BFLOAT_MAX]
    halves = np.empty(values.size, np.uint16)
    assert to_bfloat(values, halves) <= BFLOAT_MAX
    assert np.array_equal(halves, plain.to_bfloat(values))
    limit = np.array([BFLOAT_MAX, np.nextafter(np.float32(BFLOAT_MAX), np.float32(np.inf))], np.float32)
    assert plain.to_bfloat(limit).tolist() == [0x7F7F, 0x7F80]


@pytest.mark.parametrize("size", [0, 1, 7, 319, 8191, 8192, 8193, 50_001])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_size(size: int, dtype: Any) -> None:
    values = np.random.default_rng(size).standard_t(3, size).astype(dtype)
    halves, upper = np.empty(size, np.uint16), np.empty(size, np.uint16)
    for cast, kind, reference in ((to_half, "half", plain.to_half), (to_bfloat, "bfloat", plain.to_bfloat)):
        assert cast(values, halves) == np.abs(values.astype(np.float32) if kind == "bfloat" else values).max(initial=0)
        assert np.array_equal(halves, reference(values))
        for accumulate in (False, True):
            out = np.full(size, 0.25, dtype)
            widen(memoryview(b"?" + halves.tobytes())[1:], kind=kind, out=out, accumulate=accumulate)
            wide = plain.widen(halves, kind)
            assert out.tobytes() == ((dtype(0.25) + wide) if accumulate else wide).astype(dtype).tobytes()
    if dtype == np.float32:
        upper_halves(values, upper)
        assert np.array_equal(upper, values.view(np.uint32) >> 16)
    for offset in (0, 1):
        assert largest_float((b"?" * offset + values.tobytes())[offset:], dtype) == np.abs(values).max(initial=0)


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_widening_every_finite_pattern_is_exact(kind: str) -> None:
    out = np.empty(FINITE[kind].size, np.float32)
    widen(FINITE[kind].tobytes(), kind=kind, out=out, accumulate=False)
    assert out.tobytes() == plain.widen(FINITE[kind], kind).tobytes()


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_patterns_that_are_not_finite_change_nothing(kind: str) -> None:
    for pattern in np.setdiff1d(ALL, FINITE[kind])[::97]:
        halves = np.zeros(10_000, np.uint16)
        halves[9_990] = pattern
        out = np.ones(10_000, np.float32)
        with pytest.raises(FrameError, match="NaN or Inf"):
            widen(halves.tobytes(), kind=kind, out=out, accumulate=False)
        assert (out == 1).all()
    with pytest.raises(FrameError, match="6 bytes, 5 came"):
        widen(bytes(5), kind=kind, out=np.empty(3, np.float32), accumulate=False)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_largest_magnitude_tells_what_is_not_finite(value: float, dtype: Any) -> None:
    values = np.ones(1000, dtype)
    values[777] = value
    halves = np.empty(1000, np.uint16)
    for found in (to_half(values, halves), to_bfloat(values, halves), largest_float(values.tobytes(), dtype)):
        assert not np.isfinite(found)
