"""Selections on the device beside the CPU's codecs: the same values, in the same form, and the same residuals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.kernels.triton.both_sides import check

pytestmark = pytest.mark.gpu

SIZES = (1, 5, 63, 64, 65, 1000)
CODECS = [
    tw.codec("topk", fraction=0.1),
    tw.codec("topk", k=7, positions="bitmap", error_scale=0.3),
    tw.codec("topk", fraction=0.01, positions="index", error_feedback=False),
]


def test_odd_sizes_and_every_share_of_zeros(device: torch.device) -> None:
    for codec in CODECS:
        random = np.random.default_rng(1)
        values = []
        for at, size in enumerate((*SIZES, 64, 65, 300)):
            drawn = random.standard_normal(size).astype(np.float32)
            drawn[random.random(size) < (0.0, 0.9, 0.5, 1.0)[at % 4]] = 0.0
            values.append(drawn)
        check(codec, values, device)


@pytest.mark.parametrize("codec", [CODECS[0], CODECS[2]], ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_bit_at_every_magnitude(codec: tw.Codec, dtype: Any, device: torch.device) -> None:
    random = np.random.default_rng(2)
    limits = np.finfo(dtype)
    values = []
    for exponent in np.linspace(np.log10(limits.tiny) - 3, np.log10(limits.max) - 1, 7):
        drawn = random.standard_normal(int(random.integers(1, 300))).astype(dtype)
        values.append(drawn * dtype(10.0**exponent) / np.abs(drawn).max())
    check(codec, values, device, steps=1)


@pytest.mark.parametrize("k", [1, 2, 99, 100, 101, 600, 1199, 1200])
def test_of_equal_magnitudes_the_first_are_sent_across_blocks(k: int, device: torch.device) -> None:
    values = np.tile(np.array([1.0, -1.0, 0.5, 0.0], np.float32), 300)
    values[1100] = 2.0
    check(tw.codec("topk", k=k), [values, -values], device, steps=1)


def test_indices_of_every_width(device: torch.device) -> None:
    values = [np.arange(1, size + 1, dtype=np.float32) for size in (1, 2, 3, 4, 5, 17, 33, 255, 256, 257, 513, 1025)]
    check(tw.codec("topk", fraction=1.0, positions="index"), values, device, steps=1)


def test_damaged_positions_leave_the_output_alone(device: torch.device) -> None:
    frame = tw.frames.parse(tw.codec("topk", k=2, positions="index").encode(np.ones(4, np.float32)))
    payload = bytearray(frame.payload)
    payload[1] = 0b0101  # twice the second value
    damaged = tw.frames.Frame(frame.codec, frame.dtype, frame.shape, frame.scales, frame.flags, bytes(payload))
    out = torch.full((4,), 7.0, device=device)
    with pytest.raises(tw.FrameError, match="not ascending"):
        tw.decode(tw.frames.pack(damaged), out=out)
    assert out.tolist() == [7.0] * 4
