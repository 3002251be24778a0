"""Random trits on the device beside the CPU's codecs: the same draws, so the same bytes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.kernels.triton.both_sides import check
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


@pytest.mark.filterwarnings("ignore:.* is unbiased")
def test_a_shared_scale_that_is_too_small_changes_nothing(device: torch.device) -> None:
    codec = terngrad(error_feedback=True, nonfinite="skip", clip=0)
    values = [torch.tensor([1.0, 0.5], device=device), torch.tensor([1.0, 2.0], device=device)]
    contexts = [codec.context(value) for value in values]
    with pytest.raises(tw.ConfigError, match=r"scale=1\.5 is below 2, the tensor's largest magnitude after clipping"):
        encode_all(contexts, values, [{}, {"scale": 1.5}])
    for context in contexts:
        assert context.residual is not None and not context.residual.any()


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
