"""Selections on the device beside the CPU's codecs: the same values, in the same form, and the same residuals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.kernels.triton.both_sides import check
from thinwire.codecs import encode_all
from thinwire.kernels.triton import batch
from thinwire.kernels.triton.batch import Batch
from thinwire.kernels.triton.order import kth_largest
from thinwire.kernels.triton.select import scatter
from thinwire.kernels.triton.workspace import DeviceWorkspace

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


def test_zeros_behind_few_indices_of_a_large_tensor(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "TILE", 4096)
    values = np.zeros(4096 * 6, np.float32)
    values[77] = 1.0
    check(tw.codec("topk", k=1, positions="index"), [values], device, steps=1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_kth_largest_is_that_of_a_sorted_tensor(dtype: Any, device: torch.device) -> None:
    random = np.random.default_rng(4)
    values = [random.standard_normal(700).astype(dtype), np.zeros(9, dtype), np.ones(5, dtype)]
    values[0][::3] = values[0][1]
    tensors = [torch.from_numpy(v).to(device) for v in values]
    space = DeviceWorkspace(device)
    for k in (1, 3, 5):
        space.follow()
        with space.running():
            found = kth_largest(
                Batch(tensors, None, per_byte=8, workspace=space), torch.tensor([k * 100, k, k], device=device)
            )
        space.synchronize()
        for value, rank, bits, quota in zip(
            values, (k * 100, k, k), found.bits.tolist(), found.quota.tolist(), strict=True
        ):
            expected = np.sort(np.abs(value))[-rank]
            assert bits == int(expected.view(np.int32 if dtype == np.float32 else np.int64))
            assert quota == rank - int((np.abs(value) > expected).sum())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", [CODECS[0], CODECS[1]], ids=repr)
def test_what_is_not_finite_leaves_residuals_alone(codec: tw.Codec, bad: float, device: torch.device) -> None:
    tensors = [torch.ones(4, device=device), torch.tensor([1.0, bad, 0.0], device=device)]
    contexts = [codec.context(tensor, name=f"w{i}") for i, tensor in enumerate(tensors)]
    for context in contexts:
        assert context.residual is not None
        context.residual.fill_(0.25)
    with pytest.raises(tw.NonFiniteError, match="w1: the values"):
        encode_all(contexts, tensors)
    for context in contexts:
        assert context.residual is not None and set(context.residual.tolist()) == {0.25} and context.step == 0
    frames = encode_all([replace(codec, nonfinite="skip").context(tensor) for tensor in tensors], tensors)
    assert [tw.frames.parse(frame).non_finite for frame in frames] == [False, True]


def test_damaged_positions_leave_the_output_alone(device: torch.device) -> None:
    frame = tw.frames.parse(tw.codec("topk", k=2, positions="index").encode(np.ones(4, np.float32)))
    payload = bytearray(frame.payload)
    payload[1] = 0b0101  # twice the second value
    damaged = tw.frames.Frame(frame.codec, frame.dtype, frame.shape, frame.scales, frame.flags, bytes(payload))
    out = torch.full((4,), 7.0, device=device)
    with pytest.raises(tw.FrameError, match="not ascending"):
        tw.decode(tw.frames.pack(damaged), out=out)
    assert out.tolist() == [7.0] * 4


def test_nothing_is_scattered_over_zeros(device: torch.device) -> None:
    out = torch.ones(3, device=device)
    space = DeviceWorkspace(device)
    scatter(np.empty(0, np.int64), np.empty(0, np.float32), out=out, accumulate=True, workspace=space)
    assert out.tolist() == [1.0] * 3
    scatter(np.empty(0, np.int64), np.empty(0, np.float32), out=out, workspace=space)
    assert out.tolist() == [0.0] * 3
