"""Zero runs: equal to the reference at every length and offset, tolerant of any split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from thinwire.errors import FrameError
from thinwire.kernels import numba as kernels
from thinwire.kernels import reference
from thinwire.kernels.numba import Workspace, zero_run_decode, zero_run_encode

WORKSPACE = Workspace()


def codes_with_runs(size: int, probability: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 243, size).astype(np.uint8)
    codes[rng.random(size) < probability] = 121
    return codes


@pytest.mark.parametrize("probability", [0.0, 0.3, 0.6, 0.9, 0.97, 0.995, 1.0])
def test_zero_runs_equal_the_reference(probability: float) -> None:
    for size in [*range(67), 319, 1000, 4095, 4096, 4097, 20_011]:
        codes = codes_with_runs(size, probability, size)
        payload = zero_run_encode(codes, workspace=WORKSPACE).copy()
        assert np.array_equal(payload, reference.zero_run_encode(codes, workspace=WORKSPACE))
        assert np.array_equal(zero_run_decode(payload, size, workspace=WORKSPACE), codes)


def test_zero_runs_of_every_length_at_every_offset() -> None:
    for offset in range(17):
        for run in range(62):
            codes = np.array([7] * offset + [121] * run + [9], dtype=np.uint8)
            payload = zero_run_encode(codes, workspace=WORKSPACE)
            assert payload.tolist() == reference.zero_run_encode(codes, workspace=WORKSPACE).tolist()


def test_zero_run_decode_takes_any_split_of_a_run() -> None:
    for split in ([243, 121, 244], [121] * 6, [247], [243] * 3):
        assert zero_run_decode(bytes(split), 6, workspace=WORKSPACE).tolist() == [121] * 6
    for impl in (kernels, reference):
        with pytest.raises(FrameError, match="holds 15 codes of five values, the shape asks for 14"):
            impl.zero_run_decode(b"\xff\x79", 14, workspace=WORKSPACE)
