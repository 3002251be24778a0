"""Whole numbers in any number of bits: equal to the plain form at every width, and to themselves after the way back."""

from __future__ import annotations

import numpy as np

from tests.kernels import oracle
from thinwire.kernels.numba.integers import pack_integers, unpack_integers

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
