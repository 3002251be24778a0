"""The compiled 3LC path: equal to the oracle bit for bit, atomic on bad input, tolerant of any split of a run."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.kernels import oracle
from thinwire.errors import FrameError, NonFiniteError
from thinwire.kernels.numba import Workspace, decode_ternary, encode_ternary
from thinwire.kernels.numba.jit import frozen
from thinwire.kernels.numba.zero_run import decode_runs, encode_runs

SIZES = [*range(11), 39, 40, 41, 63, 64, 65, 319, 1000, 4095, 4096, 4097, 20479, 20480, 20481]
DTYPES: list[Any] = [np.float32, np.float64]
WORKSPACE = Workspace()

encode, decode = partial(encode_ternary, workspace=WORKSPACE), partial(decode_ternary, workspace=WORKSPACE)


def gradient(size: int, dtype: Any, zero_fraction: float, seed: int) -> Any:
    """Heavy-tailed values of which about `zero_fraction` fall under the threshold at sparsity 1."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(0.51, 1.0, size) * rng.choice([-1.0, 1.0], size) * (rng.random(size) >= zero_fraction)
    values += 0.1 * rng.standard_t(3, size).clip(-3, 3)
    return values.astype(dtype)


def check(values: Any, residual: Any, **options: Any) -> None:
    """Encode and decode with both; scale, payload, residual and outputs must agree to the bit."""
    case = f"{values.dtype}[{values.size}], {'no' if residual is None else 'a'} residual, {options}"
    theirs = None if residual is None else residual.copy()
    ours = None if residual is None else residual.copy()
    before = values.tobytes()
    expected = oracle.encode_ternary(values, residual=theirs, **options)
    scale, payload = encode(values, residual=ours, **options)
    assert values.tobytes() == before, case
    assert scale == expected[0], case
    assert payload.dtype == np.uint8, case
    assert np.array_equal(payload, expected[1]), case
    if theirs is not None and ours is not None:
        assert theirs.tobytes() == ours.tobytes(), case
    same = {"zero_run": options.get("zero_run", True)}
    start = np.where(np.arange(values.size) % 3, values, -0.0).astype(values.dtype)
    for accumulate in (False, True):
        out, wanted = start.copy(), start.copy()
        decode(payload, scale=scale, out=out, accumulate=accumulate, **same)
        oracle.decode_ternary(expected[1], scale=scale, out=wanted, accumulate=accumulate, **same)
        assert out.tobytes() == wanted.tobytes(), case


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_oracle_at_every_size_and_flag(dtype: Any) -> None:
    flags = itertools.product((True, False), (1.0, 1.75), (None, 1.0, 0.1))
    for seed, (zero_run, sparsity, scale) in enumerate(flags):
        for size in SIZES:
            check(
                gradient(size, dtype, 0.9, seed),
                None if scale is None else gradient(size, dtype, 0.5, seed + 100),
                sparsity=sparsity,
                zero_run=zero_run,
                residual_scale=scale or 1.0,
            )


def test_equals_the_oracle_at_a_million() -> None:
    for zero_fraction in (0.8, 0.995):
        values = gradient(1_000_003, np.float32, zero_fraction, 2)
        check(values, gradient(1_000_003, np.float32, 1.0, 3), sparsity=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_oracle_at_the_ends_of_the_range(dtype: Any) -> None:
    info = np.finfo(dtype)
    tiny, largest = info.smallest_subnormal, info.max
    rng = np.random.default_rng(4)
    for values in (
        rng.integers(-9, 10, 777).astype(dtype) * tiny,  # odd multiples: m / 2 itself is rounded
        np.array([largest, -largest, largest / 2, 0.0, -0.0, tiny, -tiny], dtype=dtype),
        np.array([-0.0] * 7, dtype=dtype),
        np.array([tiny], dtype=dtype),
        rng.standard_cauchy(5001).astype(dtype),
        np.full(11, -2.5, dtype=dtype),
    ):
        check(values, None, sparsity=1.0)
        check(values, np.zeros_like(values), sparsity=1.0)
        if np.abs(values).max() < largest:
            check(values, values[::-1].copy() / 2, sparsity=1.5)


@given(
    values=hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(-100, 100, width=32)),
    sparsity=st.floats(0.5, 1.96875, width=32),
    zero_run=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_sent_plus_residual_equals_the_value(values: Any, sparsity: float, zero_run: bool) -> None:
    residual = np.zeros_like(values)
    scale, payload = encode(values, sparsity=sparsity, residual=residual, zero_run=zero_run)
    out = np.empty_like(values)
    decode(payload, scale=scale, out=out, zero_run=zero_run)
    assert set((out / scale).tolist() if scale else [0.0]) <= {-1.0, 0.0, 1.0}
    np.testing.assert_array_equal(values - out, residual)
    largest = np.abs(values).max(initial=0.0)
    clipped = largest - np.float32(scale) if sparsity < 1 else 0  # the largest are sent in part
    assert np.abs(residual).max(initial=0.0) <= max(np.float32(scale) / 2, clipped)
    assert payload.size <= -(-values.size // 5)


def test_non_finite_values_are_refused_before_a_change() -> None:
    for dtype, position, poison in itertools.product(DTYPES, (0, 3000, 50_001), (np.nan, np.inf, -np.inf)):
        values = gradient(50_002, dtype, 0.8, 5)
        residual = gradient(50_002, dtype, 0.5, 6)
        values[position] = poison
        before = residual.tobytes(), values.tobytes()
        with pytest.raises(NonFiniteError, match="NaN or Inf; nothing was changed"):
            encode(values, sparsity=1.0, residual=residual)
        with pytest.raises(NonFiniteError, match="NaN or Inf"):
            encode(values, sparsity=1.0)
        assert (residual.tobytes(), values.tobytes()) == before, (dtype, position, poison)
        values[position], residual[position] = 1.0, poison
        before = residual.tobytes(), values.tobytes()
        with pytest.raises(NonFiniteError, match="NaN or Inf"):
            encode(values, sparsity=1.0, residual=residual)
        assert (residual.tobytes(), values.tobytes()) == before, (dtype, position, poison)


def test_overflowing_scale_is_refused_before_a_change() -> None:
    for dtype in DTYPES:
        values = np.array([1.0, np.finfo(dtype).max * 0.75, 2.0], dtype=dtype)
        residual = np.array([0.5, 0.0, -0.0], dtype=dtype)
        before = residual.tobytes()
        with pytest.raises(NonFiniteError, match=r"the scale overflows: .* sparsity 1\.75"):
            encode(values, sparsity=1.75, residual=residual)
        assert residual.tobytes() == before, dtype
        encode(values, sparsity=1.0)
        residual[1] = values[1]  # each is finite, their sum is not
        before = residual.tobytes()
        with pytest.raises(NonFiniteError, match="NaN or Inf"):
            encode(values, sparsity=1.0, residual=residual)
        assert residual.tobytes() == before, dtype


def test_refuses_payloads_of_another_size() -> None:
    for payload, size, zero_run in (
        (b"", 1, True),
        (b"\x79", 0, True),
        (b"\xff\xff\x79", 5 * 28, True),
        (b"\xff", 5 * 13, True),
        (b"\x79" * 3, 6, False),
        (b"\x79\xf3", 6, False),
    ):
        out = gradient(size, np.float32, 0.5, 9)
        before = out.tobytes()
        for accumulate in (False, True):
            form: dict[str, Any] = {"zero_run": zero_run, "accumulate": accumulate}
            for decoder in (decode, oracle.decode_ternary):
                with pytest.raises(FrameError, match=r"the shape needs|which end at 242"):
                    decoder(payload, scale=1.0, out=out, **form)
            assert out.tobytes() == before, (payload, size, form)


def encoded(codes: Any) -> Any:
    buffer = WORKSPACE.codes
    buffer.reserve(codes.size)
    buffer.bytes[: codes.size] = codes
    return buffer.bytes[: encode_runs(buffer.words, codes.size, buffer.words_at, WORKSPACE.words)].copy()


def decoded(payload: Any, num_codes: int) -> Any:
    WORKSPACE.codes.reserve(num_codes)
    decode_runs(frozen(payload), WORKSPACE.codes.words_at)
    return WORKSPACE.codes.bytes[:num_codes]


def test_zero_runs_equal_the_oracle() -> None:
    for probability in (0.0, 0.3, 0.6, 0.9, 0.97, 0.995, 1.0):
        for size in [*range(67), 319, 1000, 4095, 4096, 4097, 20_011]:
            rng = np.random.default_rng(size)
            codes = rng.integers(0, 243, size).astype(np.uint8)
            codes[rng.random(size) < probability] = 121
            payload = encoded(codes)
            assert np.array_equal(payload, oracle.zero_run_encode(codes)), (probability, size)
            assert np.array_equal(decoded(payload, size), codes), (probability, size)


def test_zero_runs_of_every_length_at_every_offset() -> None:
    for offset in range(17):
        for run in range(62):
            codes = np.array([7] * offset + [121] * run + [9], dtype=np.uint8)
            assert encoded(codes).tolist() == oracle.zero_run_encode(codes).tolist(), (offset, run)


def test_zero_run_decode_takes_any_split_of_a_run() -> None:
    for split in ([243, 121, 244], [121] * 6, [247], [243] * 3):
        assert decoded(np.array(split, np.uint8), 6).tolist() == [121] * 6, split
    for impl in (partial(decode_ternary, workspace=Workspace()), oracle.decode_ternary):
        with pytest.raises(FrameError, match="holds 15 codes of five values, the shape needs 14"):
            impl(b"\xff\x79", scale=1.0, out=np.empty(70, np.float32))
