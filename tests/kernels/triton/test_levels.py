"""int8 on the device beside the CPU's codec, where magnitudes and roundings are unpleasant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw

pytestmark = pytest.mark.gpu

DTYPES: tuple[Any, ...] = (np.float32, np.float64)

CODEC = tw.codec("int8", error_feedback=True, error_scale=0.3)


def check(value: Any, residual: Any, device: torch.device) -> None:
    on_gpu, on_cpu = CODEC.context(torch.from_numpy(value).to(device)), CODEC.context(value)
    for context in (on_gpu, on_cpu):
        assert context.residual is not None
        context.residual.copy_(torch.from_numpy(residual))
    frame = on_gpu.encode(torch.from_numpy(value).to(device))
    assert frame == on_cpu.encode(value)
    assert on_gpu.residual is not None and on_cpu.residual is not None
    assert on_gpu.residual.cpu().numpy().tobytes() == on_cpu.residual.numpy().tobytes()
    for accumulate in (False, True):
        expected = np.full_like(value, -0.0)
        out = torch.from_numpy(expected.copy()).to(device)
        tw.decode(frame, out=expected, accumulate=accumulate)
        tw.decode(frame, out=out, accumulate=accumulate)
        assert out.cpu().numpy().tobytes() == expected.tobytes()


def test_every_bit_at_every_magnitude(device: torch.device) -> None:
    for dtype in DTYPES:
        random = np.random.default_rng(1)
        limits = np.finfo(dtype)
        for exponent in np.linspace(np.log10(limits.tiny) - 3, np.log10(limits.max) - 0.01, 7):
            size = int(random.integers(1, 700))
            values = random.uniform(-1, 1, size).astype(dtype)
            values[random.integers(size)] = 1
            values *= dtype(10.0**exponent)
            check(values, dtype(0.001) * values[::-1].copy(), device)


def test_halves_go_to_the_even_level(device: torch.device) -> None:
    for dtype in DTYPES:
        values = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5], dtype)
        check(values, np.zeros_like(values), device)
