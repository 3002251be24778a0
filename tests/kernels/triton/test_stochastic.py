"""Random trits on the device beside the CPU's codecs: the same draws, so the same bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.codecs import encode_all

pytestmark = pytest.mark.gpu

DTYPES: tuple[Any, ...] = (np.float32, np.float64)

SIZES = (1, 5, 63, 64, 65, 1000)
OPTIONS: list[dict[str, Any]] = [
    {"id": "terngrad"},
    {"id": "terngrad", "sigma": "rms", "packing": "base243", "clip": 1.5},
    {"id": "terngrad", "clip": 0},
]


def terngrad(**options: Any) -> tw.Codec:
    return tw.codec("terngrad", **options)


def check(codec: tw.Codec, values: list[Any], device: torch.device, *, steps: int = 2) -> None:
    """A batch of contexts on each side: the same frames and residuals for some steps, and the same decoded values."""
    ours = [codec.context(torch.from_numpy(v).to(device), name=f"w{i}", seed=7) for i, v in enumerate(values)]
    theirs = [codec.context(v, name=f"w{i}", seed=7) for i, v in enumerate(values)]
    for _ in range(steps):
        frames = encode_all(ours, [torch.from_numpy(v).to(device) for v in values])
        assert frames == [context.encode(v) for context, v in zip(theirs, values, strict=True)]
        for one, other in zip(ours, theirs, strict=True):
            assert (one.residual is None) == (other.residual is None)
            if one.residual is not None and other.residual is not None:
                assert one.residual.cpu().numpy().tobytes() == other.residual.numpy().tobytes()
    for frame, value in zip(frames, values, strict=True):
        for accumulate in (False, True):
            expected = np.full_like(value, -0.0)
            out = torch.from_numpy(expected.copy()).to(device)
            tw.decode(frame, out=expected, accumulate=accumulate)
            tw.decode(frame, out=out, accumulate=accumulate)
            assert out.cpu().numpy().tobytes() == expected.tobytes()


@pytest.mark.filterwarnings("ignore:.* is unbiased")
def test_odd_sizes_and_every_share_of_zeros(device: torch.device) -> None:
    for options, feedback in product(OPTIONS, (False, True)):
        random = np.random.default_rng(1)
        values = []
        for at, size in enumerate(SIZES):
            drawn = random.standard_normal(size).astype(np.float32)
            drawn[random.random(size) < (0.0, 0.6, 0.99, 1.0)[at % 4]] = 0.0
            values.append(drawn)
        check(tw.codec(**options, error_feedback=feedback, error_scale=0.5), values, device)


def test_every_bit_at_every_magnitude(device: torch.device) -> None:
    for options, dtype in product(OPTIONS, DTYPES):
        random = np.random.default_rng(2)
        limits = np.finfo(dtype)
        values = []
        for exponent in np.linspace(np.log10(limits.tiny) - 3, np.log10(limits.max) - 1, 7):
            drawn = random.standard_normal(int(random.integers(1, 300))).astype(dtype)
            values.append(drawn * dtype(10.0**exponent) / np.abs(drawn).max())
        check(tw.codec(**options), values, device, steps=1)


def test_a_constant_tensor_is_not_clipped_to_nothing(device: torch.device) -> None:
    check(tw.codec("terngrad"), [np.full(9, -0.1, np.float32), np.zeros(9, np.float32)], device)


def test_shared_scales_travel_in_one_batch(device: torch.device) -> None:
    values = [np.array([0.5, -2.0], np.float32), np.array([3.0, 1.0, 0.0], np.float32), np.ones(3, np.float32)]
    ours = [
        terngrad(scale=s).context(torch.from_numpy(v).to(device)) for s, v in zip((4, 3, None), values, strict=True)
    ]
    theirs = [context.codec.context(v) for context, v in zip(ours, values, strict=True)]
    frames = encode_all(ours, [torch.from_numpy(v).to(device) for v in values])
    assert frames == [context.encode(v) for context, v in zip(theirs, values, strict=True)]
    assert [tw.frames.parse(frame).scales for frame in frames] == [(4.0,), (3.0,), (1.0,)]


@pytest.mark.filterwarnings("ignore:.* is unbiased")
def test_a_shared_scale_that_is_too_small_changes_nothing(device: torch.device) -> None:
    codec = terngrad(error_feedback=True, nonfinite="skip", clip=0)
    values = [torch.tensor([1.0, 0.5], device=device), torch.tensor([1.0, 2.0], device=device)]
    contexts = [codec.context(value) for value in values]
    with pytest.raises(tw.ConfigError, match=r"scale=1\.5 is below 2, the tensor's largest magnitude after clipping"):
        encode_all(contexts, values, [{}, {"scale": 1.5}])
    for context in contexts:
        assert context.residual is not None and not context.residual.any()


@pytest.mark.filterwarnings("ignore:.* is unbiased")
def test_what_is_not_finite_is_refused(device: torch.device) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        codec = terngrad(error_feedback=True)
        context = codec.context(torch.zeros(3, device=device), name="w")
        with pytest.raises(tw.NonFiniteError, match="w: the values"):
            context.encode(torch.tensor([1.0, bad, 0.0], device=device))
        assert context.residual is not None and not context.residual.any() and context.step == 0, bad
        skipping = replace(codec, nonfinite="skip").encode(torch.tensor([bad], device=device))
        assert tw.frames.parse(skipping).non_finite, bad


@pytest.mark.parametrize("clip", [0, 2.5])
@pytest.mark.parametrize("sigma", ["mean", "rms"])
def test_the_local_scale_is_found_on_the_device(clip: float, sigma: Any, device: torch.device) -> None:
    codec = terngrad(clip=clip, sigma=sigma)
    values = np.random.default_rng(3).standard_normal(1500).astype(np.float32)
    assert codec.local_scale(torch.from_numpy(values).to(device)) == codec.local_scale(values)
    assert codec.local_scale(torch.zeros(0, device=device)) == 0.0
    with pytest.raises(tw.NonFiniteError):
        codec.local_scale(torch.tensor([float("nan")], device=device))


def test_two_bits_that_are_no_trit_leave_the_output_alone(device: torch.device) -> None:
    frame = tw.frames.parse(tw.codec("terngrad").encode(np.ones(4, np.float32)))
    damaged = tw.frames.Frame(frame.codec, frame.dtype, frame.shape, frame.scales, frame.flags, b"\xff")
    out = torch.full((4,), 7.0, device=device)
    with pytest.raises(tw.FrameError, match="two bits of a trit are both set"):
        tw.decode(tw.frames.pack(damaged), out=out)
    assert out.tolist() == [7.0] * 4
