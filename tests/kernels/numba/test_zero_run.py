"""Zero runs: equal to the oracle at every length and offset, tolerant of any split, in memory that is used again."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.kernels import oracle
from thinwire.errors import FrameError
from thinwire.kernels.numba import Workspace, decode_ternary
from thinwire.kernels.numba.jit import frozen
from thinwire.kernels.numba.zero_run import zero_run_decode, zero_run_encode

encode = partial(zero_run_encode, workspace=Workspace())
decode = partial(zero_run_decode, workspace=Workspace())


def test_zero_runs_equal_the_oracle() -> None:
    for probability in (0.0, 0.3, 0.6, 0.9, 0.97, 0.995, 1.0):
        for size in [*range(67), 319, 1000, 4095, 4096, 4097, 20_011]:
            rng = np.random.default_rng(size)
            codes = rng.integers(0, 243, size).astype(np.uint8)
            codes[rng.random(size) < probability] = 121
            payload = encode(codes)
            assert np.array_equal(payload, oracle.zero_run_encode(codes)), (probability, size)
            assert np.array_equal(decode(frozen(payload), size), codes), (probability, size)


def test_zero_runs_of_every_length_at_every_offset() -> None:
    for offset in range(17):
        for run in range(62):
            codes = np.array([7] * offset + [121] * run + [9], dtype=np.uint8)
            assert encode(codes).tolist() == oracle.zero_run_encode(codes).tolist(), (offset, run)


def test_zero_run_decode_takes_any_split_of_a_run() -> None:
    for split in ([243, 121, 244], [121] * 6, [247], [243] * 3):
        assert decode(frozen(np.array(split, np.uint8)), 6).tolist() == [121] * 6, split
    for impl in (partial(decode_ternary, workspace=Workspace()), oracle.decode_ternary):
        with pytest.raises(FrameError, match="holds 15 codes of five values, the shape asks for 14"):
            impl(b"\xff\x79", scale=1.0, out=np.empty(70, np.float32))
