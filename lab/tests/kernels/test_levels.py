"""Stochastic levels and their Elias-gamma code: equal to the oracle; damaged bits raise FrameError."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.tests.kernels import oracle
from thinwire.errors import FrameError
from thinwire_lab.kernels.elias import decode_levels, encode_levels
from thinwire_lab.kernels.levels import bucket_largest, bucket_norms, round_to_levels, value_of_levels, worth

KEY = (5, 6)
DTYPES: tuple[Any, ...] = (np.float32, np.float64)


def test_levels_equal_the_oracle() -> None:
    shapes = ((1, 1), (319, 64), (1000, 1000), (70_001, 512), (140_000, 1 << 20))
    for (size, bucket), top, natural, dtype in product(shapes, (1, 4, 15, 64), (False, True), DTYPES):
        case = size, bucket, top, natural, dtype
        values = np.random.default_rng(size).standard_t(3, size).astype(dtype)
        values[::5] = 0
        values[: min(bucket, size)] *= 0 if size > bucket else 1
        norms = np.maximum.reduceat(np.abs(values), np.arange(0, size, bucket)).astype(dtype)
        options: dict[str, Any] = {"norms": norms, "bucket": bucket, "top": top, "natural": natural}
        got = np.empty(size, np.int16)
        round_to_levels(values, key=KEY, out=got, **options)
        assert np.array_equal(got, oracle.round_to_levels(values, key=KEY, **options)), case
        out = np.ones(size, dtype)
        value_of_levels(got, out=out, accumulate=True, **options)
        wanted = oracle.value_of_levels(got, norms=norms, bucket=bucket, worth=worth(top, natural), dtype=dtype)
        assert out.tobytes() == (dtype(1) + wanted).tobytes(), case
        value_of_levels(got, out=out, accumulate=False, **options)
        assert out.tobytes() == wanted.tobytes(), case


def test_bits_that_no_encoder_writes() -> None:
    levels = np.array([0, 3, -1, 2], np.int16)
    packed = bytes(encode_levels(levels, top=4))
    out = np.empty(4, np.int16)
    with pytest.raises(FrameError, match="too large"):
        decode_levels(packed, top=2, out=out)
    with pytest.raises(FrameError, match="end too early"):
        decode_levels(packed[:1], top=4, out=out)
    with pytest.raises(FrameError, match="leave bits over"):
        decode_levels(packed + b"\0", top=4, out=out)
    with pytest.raises(FrameError, match="leave bits over"):
        decode_levels(packed, top=4, out=out[:3])
    with pytest.raises(FrameError, match="too large"):
        decode_levels(bytes(20), top=4, out=out)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40), st.integers(1, 40))
def test_any_bits_are_levels_or_a_frame_error(packed: bytes, size: int) -> None:
    out = np.empty(size, np.int16)
    try:
        decode_levels(packed, top=9, out=out)
    except FrameError:
        return
    assert np.abs(out).max() <= 9
    assert bytes(encode_levels(out, top=9)) == packed


def test_elias_codes_levels_of_any_size_and_top() -> None:
    tops = (1, 4, 30, 31, 63, 100, 126, 127, 1000, 1 << 14)
    for size, top in product((1, 3, 4, 5, 17, 64, 1000, 5001), tops):
        rng = np.random.default_rng(size * top)
        for spread in (0.3, 3.0, top / 2):
            levels = np.rint(rng.standard_normal(size) * spread).clip(-top, top).astype(np.int16)
            levels[size // 2] = top
            packed = encode_levels(levels, top=top)
            text = oracle.bits_of_elias_gamma(levels)
            assert "".join(map(str, np.unpackbits(packed, bitorder="little")))[: len(text)] == text, (size, top)
            assert packed.size == -(-len(text) // 8), (size, top)
            out = np.full(size + 16, -7, np.int16)
            decode_levels(memoryview(b"?" + packed.tobytes())[1:], top=top, out=out[:size])
            assert np.array_equal(out[:size], levels) and (out[size:] == -7).all(), (size, top)
            if top > 1:
                with pytest.raises(FrameError, match="too large"):
                    decode_levels(packed, top=top - 1, out=out[:size])


def test_bucket_norms_equal_numpys() -> None:
    shapes = ((1, 1), (319, 64), (1000, 1), (1000, 5000), (1003, 100), (9001, 512))
    for (size, bucket), dtype in product(shapes, DTYPES):
        case = size, bucket, dtype
        values = np.random.default_rng(size).standard_t(3, size).astype(dtype)
        unit = 1.0 if dtype == np.float32 else 2.0 ** np.frexp(np.abs(values).max())[1]
        exact = bucket_norms(values, bucket=bucket, largest=float(np.abs(values).max()))
        assert exact.tobytes() == oracle.bucket_norms(values, bucket=bucket, unit=unit).tobytes(), case
        largest = bucket_largest(values, bucket=bucket)
        assert largest.tobytes() == np.maximum.reduceat(np.abs(values), np.arange(0, size, bucket)).tobytes(), case
        values[size // 2] = np.nan
        assert not np.isfinite(bucket_largest(values, bucket=bucket).max()), case
        values[size // 2] = 0.5
        got = bucket_norms(values, bucket=bucket, largest=float(np.abs(values).max()))
        wanted = [np.linalg.norm(values[i : i + bucket].astype(np.float64)) for i in range(0, size, bucket)]
        assert got == pytest.approx(wanted, rel=1e-12), case
