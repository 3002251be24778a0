"""Codecs on the device beside the CPU's: the same sums and roundings, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.kernels.triton.both_sides import check, check_refused
from thinwire.codecs.floats import BFLOAT_MAX
from thinwire.kernels.numba.moments import STRETCH
from thinwire.kernels.triton import batch, moments

pytestmark = pytest.mark.gpu

DTYPES: tuple[Any, ...] = (np.float32, np.float64)
ONEBIT = [tw.codec("onebit", norm=norm, error_scale=0.7) for norm in ("l1", "l2")]
INT8 = tw.codec("int8", error_feedback=True, error_scale=0.3)
BF16 = [tw.codec("bf16"), *(tw.codec("bf16", error_feedback=True, error_scale=scale) for scale in (1.0, 0.3))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_at_every_magnitude(dtype: Any, device: torch.device) -> None:
    for codec in (*ONEBIT, INT8):
        random, limits, values = np.random.default_rng(2), np.finfo(dtype), []
        for exponent in np.linspace(np.log10(limits.tiny) - 3, np.log10(limits.max) - 1, 7):
            drawn = random.standard_normal(int(random.integers(1, 300))).astype(dtype)
            values.append(drawn * dtype(10.0**exponent) / np.abs(drawn).max())
        check(codec, values, device)


def test_damaged_payloads_leave_the_output_alone(device: torch.device) -> None:
    frame = tw.frames.parse(BF16[0].encode(np.ones(4, np.float32)))
    for damage in (b"\x80\x7f", b"\xc0\xff"):
        out = torch.full(frame.shape, 7.0, device=device)
        with pytest.raises(tw.FrameError, match="NaN or Inf"):
            tw.decode(tw.frames.pack(replace(frame, payload=bytes(6) + damage)), out=out)
        assert bool((out == 7.0).all()), damage


# ---- what is of one codec


def test_onebit_of_zeros_constants_and_sums_of_many_stretches(device: torch.device) -> None:
    random = np.random.default_rng(2)
    small = [np.zeros(9), np.full(1025, -0.1), np.array([0.0, -0.0])]
    for codec, values in zip(ONEBIT, (small, [*small, random.standard_normal(STRETCH + 1)]), strict=True):
        check(codec, [each.astype(np.float32) for each in values], device, steps=1)
    squares = random.random(1500)
    assert moments.root(torch.from_numpy(squares).to(device)).cpu().numpy().tobytes() == np.sqrt(squares).tobytes()


def test_int8_rounds_halves_to_the_even_level(device: torch.device) -> None:
    for dtype in DTYPES:
        check(INT8, [np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5], dtype)], device)


def test_bf16_rounds_every_half_and_midpoint_to_nearest_even(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "TILE", 4096 if device.type == "cuda" else 1 << 16)  # few programs to interpret
    below = np.arange(0x7F7F, dtype=np.uint32) << 16
    values = (below[:, None] + np.array([0, 0x7FFF, 0x8000, 0x8001], np.uint32)).view(np.float32).ravel()
    for codec in BF16:
        check(codec, [values, -values], device)
        check(codec, [np.array([BFLOAT_MAX, -BFLOAT_MAX, 0.0, -0.0], np.float32)], device, steps=1)


def test_bf16_of_float64_is_rounded_to_float32_first(device: torch.device) -> None:
    random = np.random.default_rng(1)
    values = [random.standard_normal(size) * 10.0**exponent for size, exponent in ((1, 0), (700, -300), (65, 37))]
    tie = float(np.uint32(0x3F808000).view(np.float32))  # between two halves; float32 does not see what is above it
    for codec in BF16:
        check(codec, [*values, np.array([tie, tie * (1 + 1e-12), 5e-324, -1e-46, -0.0])], device)
    above = np.nextafter(np.float32(BFLOAT_MAX), np.float32(np.inf))
    for dtype, (bad, told) in product(DTYPES, ((np.nan, "holds NaN"), (-np.inf, "holds NaN"), (above, "has a value"))):
        check_refused(BF16[1], np.ones(4, dtype), np.array([1.0, bad, 0.0], dtype), told, device)
