"""Codecs on the device beside the CPU's: the same draws, sums, selections and roundings, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.kernels.triton.both_sides import check, check_refused
from thinwire.codecs import encode_all
from thinwire.codecs.levels import MAX_WORKERS
from thinwire.frames import Frame
from thinwire.kernels.numba.casts import BFLOAT_MAX
from thinwire.kernels.numba.moments import STRETCH
from thinwire.kernels.triton import batch, moments

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.* is unbiased")]

DTYPES: tuple[Any, ...] = (np.float32, np.float64)
ONEBIT = [tw.codec("onebit", norm=norm, error_scale=0.7) for norm in ("l1", "l2")]
INT8 = tw.codec("int8", error_feedback=True, error_scale=0.3)
BF16 = [tw.codec("bf16"), *(tw.codec("bf16", error_feedback=True, error_scale=scale) for scale in (1.0, 0.3))]
TOPK = [
    tw.codec("topk", fraction=0.1),
    tw.codec("topk", k=7, positions="bitmap", error_scale=0.3),
    tw.codec("topk", fraction=0.01, positions="index", error_feedback=False),
]
TERNGRAD: list[dict[str, Any]] = [{}, {"sigma": "rms", "packing": "base243", "clip": 1.5}, {"clip": 0}]
RANDOM = [tw.codec("terngrad", **options) for options in TERNGRAD]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_at_every_magnitude(dtype: Any, device: torch.device) -> None:
    for codec in (*ONEBIT, INT8, TOPK[0], TOPK[2], *RANDOM, tw.codec("blocktopk", block=64, k=5)):
        random, limits, values = np.random.default_rng(2), np.finfo(dtype), []
        for exponent in np.linspace(np.log10(limits.tiny) - 3, np.log10(limits.max) - 1, 7):
            drawn = random.standard_normal(int(random.integers(1, 300))).astype(dtype)
            values.append(drawn * dtype(10.0**exponent) / np.abs(drawn).max())
        check(codec, values, device, steps=2 if codec in (*ONEBIT, INT8) else 1)


def test_odd_sizes_and_every_share_of_zeros(device: torch.device) -> None:
    kept = [tw.codec("terngrad", **options, error_feedback=True, error_scale=0.5) for options in TERNGRAD]
    for codec in (*TOPK, *RANDOM, *kept):
        random, values = np.random.default_rng(1), []
        for at, size in enumerate((1, 5, 63, 64, 65, 1000)):
            drawn = random.standard_normal(size).astype(np.float32)
            drawn[random.random(size) < (0.0, 0.9, 0.5, 1.0)[at % 4]] = 0.0
            values.append(drawn)
        check(codec, values, device)


def test_damaged_payloads_leave_the_output_alone(device: torch.device) -> None:
    ones = np.ones(4, np.float32)
    index, trits, halves = (
        tw.frames.parse(codec.encode(ones))
        for codec in (tw.codec("topk", k=2, positions="index"), tw.codec("terngrad"), BF16[0])
    )
    votes = Frame("votes", "fp32", (7,), (1.0, 2.0), 0, b"\xff\xff\x00")
    twice_the_second = bytes([index.payload[0], 0b0101, *index.payload[2:]])
    for frame, message in (
        (votes, "level 5 of 2"),
        (replace(votes, payload=b"\x00\x00\x80"), "padding bits"),
        (replace(votes, payload=b"\x00\x00"), "payload bytes"),
        (replace(trits, payload=b"\xff"), "two bits of a trit are both set"),
        (replace(index, payload=twice_the_second), "not ascending"),
        *((replace(halves, payload=bytes(6) + damage), "NaN or Inf") for damage in (b"\x80\x7f", b"\xc0\xff")),
    ):
        out = torch.full(frame.shape, 7.0, device=device)
        with pytest.raises(tw.FrameError, match=message):
            tw.decode(tw.frames.pack(frame), out=out)
        assert bool((out == 7.0).all()), message


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


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_votes_of_every_width_decode_as_on_the_cpu(dtype: Any, device: torch.device) -> None:
    random, every = np.random.default_rng(1), (1, 2, 4, 7, 64, 127, 128, 1000, 40_000, MAX_WORKERS)
    for workers, size in zip(every * 2, (1, 7, 8, 9, 63, 64, 65, 300, 5, 1000, 4097), strict=False):
        votes = random.integers(-workers, workers + 1, size)
        votes[0] = -workers
        frame = tw.codec("votes", workers=workers).encode((votes / workers * random.uniform(0.1, 3)).astype(dtype))
        for accumulate in (False, True):
            expected = np.full(size, 0.1, dtype)
            out = torch.from_numpy(expected.copy()).to(device)
            tw.decode(frame, out=expected, accumulate=accumulate)
            assert tw.decode(frame, out=out, accumulate=accumulate) is out
            assert out.cpu().numpy().tobytes() == expected.tobytes()


def test_bf16_of_every_half_and_what_lies_around_the_middle_between_two(
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


def test_topk_sends_the_first_of_equal_magnitudes_and_indices_of_every_width(device: torch.device) -> None:
    values = np.tile(np.array([1.0, -1.0, 0.5, 0.0], np.float32), 300)
    values[1100] = 2.0
    for k in (1, 2, 99, 100, 101, 600, 1199, 1200):
        check(tw.codec("topk", k=k), [values, -values], device, steps=1)
    every = [np.arange(1, size + 1, dtype=np.float32) for size in (1, 2, 3, 4, 5, 17, 33, 255, 256, 257, 513, 1025)]
    check(tw.codec("topk", fraction=1.0, positions="index"), every, device, steps=1)


def test_terngrad_finds_its_scale_and_refuses_one_that_is_too_small(device: torch.device) -> None:
    values = np.random.default_rng(3).standard_normal(1500).astype(np.float32)
    for clip, sigma in product((0, 2.5), ("mean", "rms")):
        codec = tw.codec("terngrad", clip=clip, sigma=sigma)
        assert codec.local_scale(torch.from_numpy(values).to(device)) == codec.local_scale(values)
        assert codec.local_scale(torch.zeros(0, device=device)) == 0.0
        with pytest.raises(tw.NonFiniteError):
            codec.local_scale(torch.tensor([float("nan")], device=device))
    codec = tw.codec("terngrad", error_feedback=True, nonfinite="skip", clip=0)
    tensors = [torch.tensor([1.0, 0.5], device=device), torch.tensor([1.0, 2.0], device=device)]
    contexts = [codec.context(value) for value in tensors]
    with pytest.raises(tw.ConfigError, match=r"scale=1\.5 is below 2, the tensor's largest magnitude after clipping"):
        encode_all(contexts, tensors, [{}, {"scale": 1.5}])
    for context in contexts:
        assert context.residual is not None and not context.residual.any()
