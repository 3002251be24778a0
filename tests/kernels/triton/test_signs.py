"""onebit on the device beside the CPU's codec: sums in the same order, to the last bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.kernels.numba.moments import STRETCH
from thinwire.kernels.triton import moments

pytestmark = pytest.mark.gpu

DTYPES: tuple[Any, ...] = (np.float32, np.float64)


def check(value: Any, residual: Any, norm: str, device: torch.device) -> None:
    codec = tw.codec("onebit", norm=norm, error_scale=0.7)
    on_gpu, on_cpu = codec.context(torch.from_numpy(value).to(device)), codec.context(value)
    for context in (on_gpu, on_cpu):
        assert context.residual is not None
        context.residual.copy_(torch.from_numpy(residual))
    frame = on_gpu.encode(torch.from_numpy(value).to(device))
    assert frame == on_cpu.encode(value)
    assert on_gpu.residual is not None and on_cpu.residual is not None
    assert on_gpu.residual.cpu().numpy().tobytes() == on_cpu.residual.numpy().tobytes()
    for accumulate in (False, True):
        expected = np.full_like(value, 0.1)
        out = torch.from_numpy(expected.copy()).to(device)
        tw.decode(frame, out=expected, accumulate=accumulate)
        tw.decode(frame, out=out, accumulate=accumulate)
        assert out.cpu().numpy().tobytes() == expected.tobytes()


def test_every_bit_at_every_magnitude(device: torch.device) -> None:
    for norm, dtype in product(("l1", "l2"), DTYPES):
        random = np.random.default_rng(1)
        limits = np.finfo(dtype)
        for exponent in np.linspace(np.log10(limits.tiny) - 3, np.log10(limits.max) - 1, 6):
            values = random.standard_normal(int(random.integers(1, 5_000))).astype(dtype)
            values *= dtype(10.0**exponent) / np.abs(values).max()
            check(values, dtype(0.5) * values[::-1].copy(), norm, device)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_zeros_and_constants(norm: str, device: torch.device) -> None:
    for values in (np.zeros(9, np.float32), np.full(1025, -0.1, np.float32), np.array([0.0, -0.0], np.float32)):
        check(values, np.zeros_like(values), norm, device)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_sums_of_many_stretches(norm: str, device: torch.device) -> None:
    for size in (STRETCH, STRETCH + 1) if norm == "l1" else (2 * STRETCH - 5,):
        values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        check(values, values[::-1].copy(), norm, device)


def test_roots_are_rounded_to_nearest(device: torch.device) -> None:
    squares = np.random.default_rng(3).random(1500)
    assert moments.root(torch.from_numpy(squares).to(device)).cpu().numpy().tobytes() == np.sqrt(squares).tobytes()
