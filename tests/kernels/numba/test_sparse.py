"""The largest values, whole numbers in any number of bits, and random trits: equal to the oracle."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.kernels import oracle
from thinwire.codecs.topk import select_top
from thinwire.errors import FrameError
from thinwire.kernels.contract import DIGITS_PER_CODE
from thinwire.kernels.numba.integers import pack_integers, unpack_integers
from thinwire.kernels.numba.stochastic import pack_stochastic, unpack_two_bit

DTYPES: tuple[Any, ...] = (np.float32, np.float64)
LARGE = 5000


def heavy(size: int, dtype: Any) -> Any:
    return np.random.default_rng(size).standard_t(2, size).astype(dtype)


CONTENTS: dict[str, Any] = {
    "heavy tails": heavy(LARGE, np.float64),
    "few levels": np.random.default_rng(0).integers(-3, 4, LARGE).astype(np.float64),
    "constant": np.full(LARGE, -2.5),
    "zero": np.zeros(LARGE),
    "mostly zero": np.where(np.arange(LARGE) % 997 == 0, heavy(LARGE, np.float64), 0.0),
    "subnormal": heavy(LARGE, np.float64) * 1e-44,
}


def test_top() -> None:
    for content, dtype, k in product(CONTENTS, DTYPES, (1, 7, 2000, LARGE - 1, LARGE)):
        values = CONTENTS[content].astype(dtype)
        assert np.array_equal(select_top(values, k), oracle.select_top(values, k)), (content, dtype, k)


SIZES = (0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 319, 1000, 4099)


def test_every_width() -> None:
    for width in range(1, 33):
        for size in SIZES:
            numbers = np.random.default_rng(size).integers(0, 1 << width, size, dtype=np.int64)
            words = np.full(-(-size * width // 32) + 2, 0xABABABAB, np.uint32)
            for given_type in (np.int64, np.uint32):
                packed = pack_integers(numbers.astype(given_type), width=width, words=words[:-2])
                assert packed.tobytes() == oracle.pack_integers(numbers, width=width).tobytes(), (width, size)
                assert (words[-2:] == 0xABABABAB).all(), "written past the end"
            out = np.full(size + 2, -7, np.int32)
            largest = unpack_integers(packed.tobytes(), width=width, out=out[:size])
            assert np.array_equal(out[:size].view(np.uint32), numbers) and (out[size:] == -7).all(), (width, size)
            assert largest == numbers.max(initial=0), (width, size)


def test_offsets_and_shifts() -> None:
    for width in (2, 4, 5, 8, 9, 11, 16):
        top = (1 << (width - 1)) - 1
        for size in SIZES:
            numbers = np.random.default_rng(size).integers(-top, top + 1, size).astype(np.int16)
            words = np.empty(-(-size * width // 32), np.uint32)
            packed = pack_integers(numbers, offset=top, width=width, words=words)
            assert packed.tobytes() == oracle.pack_integers(numbers, offset=top, width=width).tobytes(), (width, size)
            out = np.empty(size, np.int32)
            assert unpack_integers(memoryview(b"?" + packed.tobytes())[1:], offset=top, width=width, out=out) == (
                numbers.max() if size else -top
            )
            assert np.array_equal(out, numbers), (width, size)
            narrow = np.empty(size, np.uint16)
            unpack_integers(packed, width=width, out=narrow)
            assert np.array_equal(narrow, numbers.astype(np.int32) + top), (width, size)
            shifted = pack_integers(narrow.astype(np.uint32) << 5, shift=5, width=width, words=words)
            assert np.array_equal(shifted, oracle.pack_integers(narrow, width=width)), (width, size)


KEY = (0x12345678, 0xFFFFFFF0)
LENGTHS = (1, 3, 4, 5, 6, 319, 8191, 8192, 8193, 10_239, 10_240, 10_241, 100_003)


def gradient(size: int, dtype: Any) -> Any:
    values = np.random.default_rng(size).standard_t(3, size)
    values[::7] = 0.0
    return values.astype(dtype)


def test_equals_the_oracle() -> None:
    for size, dtype, packing in product(LENGTHS, DTYPES, ("base243", "2bit")):
        values = gradient(size, dtype)
        scale = float(np.abs(values).max())
        got = np.full(-(-size // DIGITS_PER_CODE[packing]), 255, np.uint8)
        wanted = np.empty_like(got)
        for share in (1.0, 0.4):
            options: dict[str, Any] = {"scale": scale, "limit": share * scale, "key": KEY, "packing": packing}
            num_nonzero = pack_stochastic(values, codes=got, **options)
            assert num_nonzero == oracle.pack_stochastic(values, codes=wanted, **options), (size, dtype, packing)
            assert np.array_equal(got, wanted), (size, dtype, packing)


def test_probabilities_at_the_ends_of_the_type() -> None:
    """Half of the scale is kept half of the time, the whole always, also where half a scale rounds to a subnormal."""
    for dtype, scale in product(DTYPES, ("smallest", "subnormal", "largest")):
        info = np.finfo(dtype)
        s = {"smallest": 2 * info.smallest_subnormal, "subnormal": info.tiny / 8, "largest": info.max}[scale]
        values = np.repeat(np.array([s, s / 2, 0], dtype), 20_000)
        codes = np.empty(15_000, np.uint8)
        pack_stochastic(values, scale=float(s), limit=float(s), key=KEY, packing="2bit", codes=codes)
        out = np.empty(values.size, np.float32)
        unpack_two_bit(codes, scale=1.0, out=out, accumulate=False)
        whole, half, zero = out.reshape(3, -1).mean(axis=1)
        assert (whole, zero) == (1.0, 0.0), (dtype, scale)
        assert abs(half - 0.5) < 5 * 0.5 / np.sqrt(20_000), (dtype, scale)


def test_two_bit_trits_decode() -> None:
    for size, dtype in product((1, 2, 3, 4, 5, 7, 8, 319, 1001), DTYPES):
        case = size, dtype
        trits = np.random.default_rng(size).integers(-1, 2, size).astype(np.int8)
        codes = oracle.pack_trits(trits, "2bit")
        out = np.full(size, -0.0, dtype)
        unpack_two_bit(codes, scale=0.3, out=out, accumulate=True)
        assert out.tobytes() == np.where(trits == 0, dtype(-0.0), trits * dtype(0.3)).astype(dtype).tobytes(), case
        unpack_two_bit(codes, scale=0.3, out=out, accumulate=False)
        assert out.tobytes() == np.where(trits == 0, dtype(0), trits * dtype(0.3)).astype(dtype).tobytes(), case


def test_two_bit_trits_of_3_raise_frame_error() -> None:
    out = np.ones(4, np.float32)
    for place in range(4):
        with pytest.raises(FrameError, match="both set"):
            unpack_two_bit(np.array([3 << 2 * place], np.uint8), scale=1.0, out=out, accumulate=False)
    assert out.tolist() == [1, 1, 1, 1]


def test_draws_never_change() -> None:
    """Frames of `randomk` hold the key instead of positions: these numbers are part of the wire format."""
    assert oracle.draws((1, 2), 4).tolist() == [4145324735, 4161103663, 2412645041, 1675560945]


G = np.array([0.4, -0.1, 0, -0.8, 0.2, 0.6])
U = np.array([0.3, 0.2, 0, 0.999, 0.25, 0.7])


def test_terngrad_of_the_worked_example() -> None:
    t = oracle.ternarise(G, scale=0.8, limit=0.8, uniforms=U)
    assert t.tolist() == [1, 0, 0, -1, 0, 1]
    assert oracle.pack_trits(t, "2bit").tolist() == [22, 89]
