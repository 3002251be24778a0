"""onebit on the device beside the CPU's codec: sums in the same order, to the last bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.kernels.triton.both_sides import check
from thinwire.kernels.numba.moments import STRETCH
from thinwire.kernels.triton import moments

pytestmark = pytest.mark.gpu

CODECS = [tw.codec("onebit", norm=norm, error_scale=0.7) for norm in ("l1", "l2")]
DTYPES: tuple[Any, ...] = (np.float32, np.float64)


def test_every_bit_at_every_magnitude(device: torch.device) -> None:
    for codec, dtype in product(CODECS, DTYPES):
        random, limits, values = np.random.default_rng(1), np.finfo(dtype), []
        for exponent in np.linspace(np.log10(limits.tiny) - 3, np.log10(limits.max) - 1, 6):
            drawn = random.standard_normal(int(random.integers(1, 5_000))).astype(dtype)
            values.append(drawn * dtype(10.0**exponent) / np.abs(drawn).max())
        check(codec, values, device)


def test_zeros_constants_and_sums_of_many_stretches(device: torch.device) -> None:
    random = np.random.default_rng(2)
    for codec, sizes in zip(CODECS, ((STRETCH, STRETCH + 1), (2 * STRETCH - 5,)), strict=True):
        small = [np.zeros(9), np.full(1025, -0.1), np.array([0.0, -0.0])]
        check(codec, [each.astype(np.float32) for each in (*small, *map(random.standard_normal, sizes))], device)


def test_roots_are_rounded_to_nearest(device: torch.device) -> None:
    squares = np.random.default_rng(3).random(1500)
    assert moments.root(torch.from_numpy(squares).to(device)).cpu().numpy().tobytes() == np.sqrt(squares).tobytes()
