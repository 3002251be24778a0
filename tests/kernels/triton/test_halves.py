"""bf16 on the device beside the CPU's codec: every half there is, ties, and what rounds to Inf."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.kernels.triton.both_sides import check
from thinwire.codecs import encode_all
from thinwire.kernels.numba.casts import BFLOAT_MAX
from thinwire.kernels.triton import batch

pytestmark = pytest.mark.gpu

CODECS = [
    tw.codec("bf16"),
    tw.codec("bf16", error_feedback=True),
    tw.codec("bf16", error_feedback=True, error_scale=0.3),
]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_every_half_and_what_lies_around_the_middle_between_two(
    codec: tw.Codec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "TILE", 4096 if device.type == "cuda" else 1 << 16)  # few programs to interpret
    below = np.arange(0x7F7F, dtype=np.uint32) << 16
    values = (below[:, None] + np.array([0, 0x7FFF, 0x8000, 0x8001], np.uint32)).view(np.float32).ravel()
    check(codec, [values, -values], device)
    check(codec, [np.array([BFLOAT_MAX, -BFLOAT_MAX, 0.0, -0.0], np.float32)], device, steps=1)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_float64_is_rounded_to_float32_first(codec: tw.Codec, device: torch.device) -> None:
    random = np.random.default_rng(1)
    values = [random.standard_normal(size) * 10.0**exponent for size, exponent in ((1, 0), (700, -300), (65, 37))]
    tie = float(np.uint32(0x3F808000).view(np.float32))  # between two halves; float32 does not see what is above it
    check(codec, [*values, np.array([tie, tie * (1 + 1e-12), 5e-324, -1e-46, -0.0])], device)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_not_finite_or_rounds_to_inf_leaves_residuals_alone(dtype: Any, device: torch.device) -> None:
    above = np.nextafter(np.float32(BFLOAT_MAX), np.float32(np.inf))
    for bad, message in ((np.nan, "w1: holds NaN"), (-np.inf, "w1: holds NaN"), (above, "w1: has a value that rounds")):
        arrays = [np.ones(4, dtype), np.array([1.0, bad, 0.0], dtype)]
        tensors = [torch.from_numpy(array).to(device) for array in arrays]
        contexts = [CODECS[1].context(tensor, name=f"w{i}") for i, tensor in enumerate(tensors)]
        with np.errstate(all="ignore"), pytest.raises(tw.NonFiniteError, match=message):
            CODECS[1].context(arrays[1], name="w1").encode(arrays[1])
        for context in contexts:
            assert context.residual is not None
            context.residual.fill_(2.0**-20)
        # The interpreter is NumPy, which warns of Inf - Inf.
        with np.errstate(all="ignore"), pytest.raises(tw.NonFiniteError, match=message):
            encode_all(contexts, tensors)
        for context in contexts:
            assert context.residual is not None and set(context.residual.tolist()) == {2.0**-20}
        skips = tw.codec("bf16", nonfinite="skip")
        frames = encode_all([skips.context(tensor) for tensor in tensors], tensors)
        assert [tw.frames.parse(frame).non_finite for frame in frames] == [False, True]


@pytest.mark.parametrize("damage", [b"\x80\x7f", b"\xc0\xff"])
def test_nan_and_inf_in_a_frame_leave_the_output_alone(damage: bytes, device: torch.device) -> None:
    frame = tw.frames.parse(tw.codec("bf16").encode(np.ones(4, np.float32)))
    payload = bytes(frame.payload[:4]) + damage + bytes(frame.payload[6:])
    out = torch.full((4,), 7.0, device=device)
    with pytest.raises(tw.FrameError, match="NaN or Inf"):
        tw.decode(tw.frames.pack(frame.__class__(frame.codec, frame.dtype, frame.shape, payload=payload)), out=out)
    assert out.tolist() == [7.0] * 4
