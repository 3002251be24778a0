"""Kernels of the dense codecs (levels, signs, sums, 16-bit floats): equal to the oracle bit for bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import thinwire as tw
from tests.kernels import oracle
from thinwire.codecs.floats import BFLOAT_MAX
from thinwire.errors import NonFiniteError
from thinwire.kernels.numba import max_magnitude
from thinwire.kernels.numba.bits import pack_signs, unpack_signs
from thinwire.kernels.numba.moments import moments
from thinwire.kernels.numba.rounding import round_to_int8, scale_levels

SIZES = [1, 2, 7, 8, 9, 63, 64, 65, 319, 1023, 1024, 1025, 8191, 8192, 8193, 131_073, 400_000]
DTYPES: tuple[Any, ...] = (np.float32, np.float64)


def gradient(size: int, dtype: Any, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).standard_t(3, size)
    values[::7] = 0.0
    values[1::97] = -0.0
    return values.astype(dtype)


def both(size: int, dtype: Any) -> list[tuple[Any, Any]]:
    """A residual for the kernel and an equal one for the oracle; or neither."""
    residual = gradient(size, dtype, seed=1)
    return [(None, None), (residual, residual.copy())]


def test_255_levels() -> None:
    for size, dtype in product(SIZES, DTYPES):
        values = gradient(size, dtype)
        for ours, theirs in both(size, dtype):
            got, wanted = np.empty(size, np.int8), np.empty(size, np.int8)
            round_to_int8(values, scale=0.037, levels=got, residual=ours, residual_scale=0.7)
            oracle.round_to_int8(values, scale=0.037, levels=wanted, residual=theirs, residual_scale=0.7)
            assert np.array_equal(got, wanted), (size, dtype)
            if ours is not None:
                assert ours.tobytes() == theirs.tobytes(), (size, dtype)
            out = np.full(size, 0.25, dtype)
            scale_levels(got, scale=0.037, out=out, accumulate=False)
            assert out.tobytes() == (got * dtype(0.037)).tobytes(), (size, dtype)
            scale_levels(got, scale=0.037, out=out, accumulate=True)
            assert out.tobytes() == (got * dtype(0.037) + got * dtype(0.037)).tobytes(), (size, dtype)


def test_sums() -> None:
    for size, dtype in product(SIZES, DTYPES):
        case = size, dtype
        values = gradient(size, dtype)
        residual = gradient(size, dtype, seed=1)
        for options in ({}, {"residual": residual, "residual_scale": 0.3}):
            got = moments(values, **options)
            assert got == oracle.moments(values, **options, unit=got.unit), case
            v = oracle.with_residual(values, options.get("residual"), 0.3)
            assert got.squares * got.unit**2 == pytest.approx(float((v.astype(np.float64) ** 2).sum()), rel=1e-12), case
            assert moments(values, **options, signed=False).squares == got.squares, case
            assert moments(values, **options, squares=False)[:2] == got[:2], case


def test_sums_of_numbers_whose_squares_overflow() -> None:
    largest = np.finfo(np.float64).max
    got = moments(np.array([largest, -largest]))
    assert np.sqrt(got.squares / 2) * got.unit == largest
    tiny = moments(np.array([5e-324, -5e-324, 0.0]))
    assert (tiny.positive * tiny.unit, tiny.negative * tiny.unit, tiny.num_nonnegative) == (5e-324, -5e-324, 2)


def test_sums_refuse_nan_and_inf() -> None:
    for dtype, bad in product(DTYPES, (np.nan, np.inf, -np.inf)):
        values = gradient(5000, dtype)
        values[4321] = bad
        with pytest.raises(NonFiniteError, match="NaN or Inf"):
            moments(values)
        with pytest.raises(NonFiniteError, match="NaN or Inf"):
            moments(gradient(5000, dtype), residual=values)


def test_signs() -> None:
    for size, dtype in product(SIZES, DTYPES):
        values = gradient(size, dtype)
        for ours, theirs in both(size, dtype):
            got, wanted = np.full(-(-size // 8), 255, np.uint8), np.empty(-(-size // 8), np.uint8)
            options: dict[str, Any] = {"residual_scale": 0.9, "low": -0.3, "high": 0.4}
            pack_signs(values, bits=got, residual=ours, **options)
            oracle.pack_signs(values, bits=wanted, residual=theirs, **options)
            assert np.array_equal(got, wanted), (size, dtype)
            if ours is not None:
                assert ours.tobytes() == theirs.tobytes(), (size, dtype)
            for accumulate in (False, True):
                out, expected = values.copy(), values.copy()
                unpack_signs(got, low=-0.3, high=0.4, out=out, accumulate=accumulate)
                oracle.unpack_signs(got, low=-0.3, high=0.4, out=expected, accumulate=accumulate)
                assert out.tobytes() == expected.tobytes(), (size, dtype)


def test_largest_magnitudes() -> None:
    for dtype, size in product(DTYPES, (0, 1, 5, 64, 1001)):
        values, residual = gradient(size, dtype), gradient(size, dtype, seed=1)
        assert max_magnitude(values) == oracle.max_magnitude(values), (dtype, size)
        v = oracle.with_residual(values, residual, 0.3)
        assert max_magnitude(values, residual, 0.3) == oracle.max_magnitude(v), (dtype, size)
    for dtype in DTYPES:
        assert max_magnitude(np.array([-0.0], dtype=dtype)) == 0.0
        assert max_magnitude(np.array([1.0, -np.inf, 2.0], dtype=dtype)) == np.inf
        assert np.isnan(max_magnitude(np.array([1.0, np.nan, np.inf], dtype=dtype)))
        assert not np.isfinite(max_magnitude(np.ones(3, dtype), np.array([0, np.nan, 0], dtype)))


FINITE = np.arange(1 << 16, dtype=np.uint16)
FINITE = FINITE[(FINITE & 0x7F80) != 0x7F80]


def neighbours(values: Any, dtype: Any) -> Any:
    """The values, the middles between them, and what lies one unit in the last place beside all of these."""
    ascending = np.unique(values.astype(dtype))
    middles = ascending[:-1] / 2 + ascending[1:] / 2
    both = np.concatenate([ascending, middles])
    return np.concatenate([both, np.nextafter(both, dtype(np.inf)), np.nextafter(both, dtype(-np.inf))])


def halves_of(values: Any) -> Any:
    return np.frombuffer(tw.frames.parse(tw.codec("bf16").encode(values)).payload, np.uint16)


def test_bfloat_rounds_half_to_even_beside_every_bfloat() -> None:
    for dtype in DTYPES:
        with np.errstate(over="ignore"):
            values = neighbours(oracle.widen(FINITE), dtype)
            values = values[np.abs(values.astype(np.float32)) <= BFLOAT_MAX]
        assert np.array_equal(halves_of(values), oracle.to_bfloat(values)), dtype
    limit = np.array([BFLOAT_MAX, np.nextafter(np.float32(BFLOAT_MAX), np.float32(np.inf))], np.float32)
    assert oracle.to_bfloat(limit).tolist() == [0x7F7F, 0x7F80]


def test_any_size() -> None:
    for size, dtype in product((1, 7, 319, 8191, 8192, 8193, 50_001), DTYPES):
        case = size, dtype
        values = np.random.default_rng(size).standard_t(3, size).astype(dtype)
        frame = tw.codec("bf16").encode(values)
        assert np.array_equal(halves_of(values), oracle.to_bfloat(values)), case
        wide = oracle.widen(halves_of(values))
        for accumulate in (False, True):
            out = np.full(size, 0.25, dtype)
            tw.decode(frame, out=out, accumulate=accumulate)
            assert out.tobytes() == ((dtype(0.25) + wide) if accumulate else wide).astype(dtype).tobytes(), case
        for offset in (0, 1):
            found = max_magnitude(np.frombuffer(b"?" * offset + values.tobytes(), dtype, offset=offset))
            assert found == np.abs(values).max(initial=0), case


def test_widening_every_finite_pattern_is_exact() -> None:
    frame = tw.frames.pack(tw.frames.Frame("bf16", "fp32", FINITE.shape, payload=FINITE.tobytes()))
    assert tw.decode(frame).numpy().tobytes() == oracle.widen(FINITE).tobytes()
