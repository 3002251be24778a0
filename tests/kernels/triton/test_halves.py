"""bf16 on the device beside the CPU's codec: every half there is, ties, and what rounds to Inf."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.kernels.triton.both_sides import check, check_refused
from thinwire.kernels.numba.casts import BFLOAT_MAX
from thinwire.kernels.triton import batch

pytestmark = pytest.mark.gpu

CODECS = [
    tw.codec("bf16"),
    tw.codec("bf16", error_feedback=True),
    tw.codec("bf16", error_feedback=True, error_scale=0.3),
]


def test_every_half_and_what_lies_around_the_middle_between_two(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "TILE", 4096 if device.type == "cuda" else 1 << 16)  # few programs to interpret
    below = np.arange(0x7F7F, dtype=np.uint32) << 16
    values = (below[:, None] + np.array([0, 0x7FFF, 0x8000, 0x8001], np.uint32)).view(np.float32).ravel()
    for codec in CODECS:
        check(codec, [values, -values], device)
        check(codec, [np.array([BFLOAT_MAX, -BFLOAT_MAX, 0.0, -0.0], np.float32)], device, steps=1)


def test_float64_is_rounded_to_float32_first(device: torch.device) -> None:
    random = np.random.default_rng(1)
    values = [random.standard_normal(size) * 10.0**exponent for size, exponent in ((1, 0), (700, -300), (65, 37))]
    tie = float(np.uint32(0x3F808000).view(np.float32))  # between two halves; float32 does not see what is above it
    for codec in CODECS:
        check(codec, [*values, np.array([tie, tie * (1 + 1e-12), 5e-324, -1e-46, -0.0])], device)


def test_what_is_not_finite_or_rounds_to_inf_is_refused_and_so_is_its_frame(device: torch.device) -> None:
    above = np.nextafter(np.float32(BFLOAT_MAX), np.float32(np.inf))
    for dtype in (np.float32, np.float64):
        for bad, told in ((np.nan, "holds NaN"), (-np.inf, "holds NaN"), (above, "has a value that rounds")):
            check_refused(CODECS[1], np.ones(4, dtype), np.array([1.0, bad, 0.0], dtype), told, device)
    frame = tw.frames.parse(CODECS[0].encode(np.ones(4, np.float32)))
    for damage in (b"\x80\x7f", b"\xc0\xff"):
        payload = bytes(frame.payload[:4]) + damage + bytes(frame.payload[6:])
        out = torch.full((4,), 7.0, device=device)
        with pytest.raises(tw.FrameError, match="NaN or Inf"):
            tw.decode(tw.frames.pack(replace(frame, payload=payload)), out=out)
        assert out.tolist() == [7.0] * 4
