"""`terngrad`, `votes` and `onebit`: the papers' numbers, and what each promises beyond the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.codecs.contract import naming
from thinwire.frames import Flags, Frame


def terngrad(**options: Any) -> tw.Codec:
    return tw.codec("terngrad", **options)


def mean_of(codec: tw.Codec, tensor: torch.Tensor, draws: int) -> torch.Tensor:
    context = codec.context(tensor, seed=3)
    total = torch.zeros_like(tensor)
    for _ in range(draws):
        tw.decode(context.encode(tensor), out=total, accumulate=True)
    return total / draws


# ---- clipping (TernGrad §3.3)


def test_clipping_of_one_hot() -> None:
    assert terngrad().local_scale(torch.tensor([1.0] + [0.0] * 9)) == pytest.approx(0.75)


def test_sigma_about_zero_keeps_a_tensor_with_a_large_mean() -> None:
    tensor = torch.from_numpy((0.7 + 0.01 * np.random.default_rng(0).standard_normal(64)).astype(np.float32))
    assert 0.02 < terngrad().local_scale(tensor) < 0.03
    assert terngrad(sigma="rms").local_scale(tensor) == float(tensor.max())


def test_clipping_a_gaussian_changes_length_and_direction_a_little() -> None:
    values = np.random.default_rng(0).standard_normal(1_000_000)
    limit = terngrad().local_scale(torch.from_numpy(values))
    clipped = values.clip(-limit, limit)
    length = np.linalg.norm(clipped) / np.linalg.norm(values)
    angle = np.degrees(np.arccos(clipped @ values / np.linalg.norm(clipped) / np.linalg.norm(values)))
    assert 100 * (1 - length) == pytest.approx(1.12, abs=0.05)
    assert angle == pytest.approx(2.75, abs=0.1)


def test_terngrad_is_unbiased_with_respect_to_the_clipped_tensor() -> None:
    tensor = torch.tensor([1.0, *[0.125] * 4, *[-0.125] * 5])
    codec = terngrad()
    clipped = tensor.clamp(-codec.local_scale(tensor), codec.local_scale(tensor))
    assert torch.allclose(mean_of(codec, tensor, 3000), clipped, atol=5 * 0.4 / 3000**0.5)


# ---- scalar sharing and votes (TernGrad §3.1)


def test_votes_carry_the_mean_of_shared_scale_trits_exactly() -> None:
    rng = np.random.default_rng(0)
    tensors = [torch.from_numpy(rng.standard_normal(1001).astype(np.float32)) for _ in range(5)]
    scale = max(terngrad().local_scale(tensor) for tensor in tensors)
    total = torch.zeros(1001)
    for worker, tensor in enumerate(tensors):
        frame = terngrad(scale=scale).context(tensor, seed=worker).encode(tensor)
        assert tw.frames.parse(frame).scales == (scale,)
        tw.decode(frame, out=total, accumulate=True)
    mean = total / 5
    frame = tw.codec("votes", workers=5, scale=scale).encode(mean)
    assert (
        tw.frames.parse(frame).payload
        == tw.frames.parse(tw.codec("votes", workers=5, scale=scale).encode(tw.decode(frame))).payload
    )
    assert torch.allclose(tw.decode(frame), mean, rtol=1e-6, atol=0)
    counts = tw.decode(frame) * 5 / scale
    assert torch.allclose(counts, counts.round(), atol=1e-5)
    assert len(tw.frames.parse(frame).payload) == -(-1001 * 4 // 8)


def test_scale_as_a_step_option_equals_the_codec_option() -> None:
    """One codec gives the same bytes as with the option: a step's shared scale is not part of its configuration."""
    tensor = torch.linspace(-1, 1, 101)
    for context in (terngrad().context(tensor), terngrad(scale=9.0).context(tensor)):
        for scale in (2.0, 3.0):
            expected = terngrad(scale=scale).context(tensor)
            expected.step = context.step
            assert context.encode(tensor, scale=scale) == expected.encode(tensor)
    mean = tw.decode(terngrad(clip=0, scale=1.0).encode(tensor))
    said = tw.codec("votes").encode(mean, scale=1.0, workers=7)
    assert said == tw.codec("votes", scale=1.0, workers=7).encode(mean)


def test_local_scale_of_a_context_includes_its_residual() -> None:
    with pytest.warns(UserWarning, match="terngrad is unbiased"):
        made = tw.codec("terngrad", clip=0, error_feedback=True, error_scale=0.5)
    context = made.context(torch.zeros(3))
    for step in range(20):
        gradient = torch.tensor([0.5, -2.0 + step / 8, 0.25])
        assert context.residual is not None
        expected = float((0.5 * context.residual + gradient).abs().max())
        assert context.local_scale(gradient) == expected
        context.encode(gradient, scale=expected)


def test_shared_scale_below_the_tensors_is_refused() -> None:
    with pytest.raises(tw.ConfigError, match="local_scale"):
        terngrad(scale=0.5, clip=0).encode(torch.tensor([1.0]))
    with pytest.raises(tw.ConfigError, match="largest magnitude"):
        tw.codec("votes", scale=0.5).encode(torch.tensor([1.0]))


def test_votes_mean_rounded_above_the_scale_is_a_full_vote() -> None:
    above = np.nextafter(np.float32(0.3), np.float32(1))
    assert tw.decode(tw.codec("votes", scale=0.3).encode(np.array([above, -above]))).tolist() == pytest.approx(
        [0.3, -0.3]
    )


def test_votes_invalid_frames_raise_frame_error() -> None:
    cases: list[tuple[tuple[float, ...], bytes, str]] = [
        ((1.0,), b"\0", "2 scales"),
        ((1.0, 0.0), b"\0", "whole number, 1 … 1048576"),
        ((1.0, 1.5), b"\0", "whole number, 1 … 1048576"),
        ((-1.0, 1.0), b"\0", "2 scales"),
        ((1.0, 1e9), b"\0", "whole number, 1 … 1048576"),
        ((1.0, 1.0), b"\x0f", "level 2 of 1"),
        ((1.0, 1.0), b"\x20", "padding"),
        ((1.0, 1.0), b"\0\0", "payload bytes"),
    ]
    for scales, payload, message in cases:
        with naming(f"{scales!r}"), pytest.raises(tw.FrameError, match=message):
            tw.decode(tw.frames.pack(Frame("votes", "fp32", (2,), scales, 0, payload)))


# ---- randomness


V = torch.tensor([0.3, -0.4, 0.0, 1.2])


def test_onebit_scales() -> None:
    cases: list[tuple[dict[str, Any], list[float], list[int]]] = [
        ({}, [0.65, -0.65, 0.65, 0.65], [0b10110000]),
        ({"norm": "l1"}, [0.475, -0.475, 0.475, 0.475], [0b10110000]),
        ({"zeros": "keep"}, [0.750555, -0.750555, 0.0, 0.750555], [0b11010000, 0b10010000]),
        ({"norm": "l1", "zeros": "keep"}, [0.633333, -0.633333, 0.0, 0.633333], [0b11010000, 0b10010000]),
    ]
    for options, decoded, payload in cases:
        with naming(f"{options!r}"):
            frame = tw.codec("onebit", **options).encode(V)
            assert tw.decode(frame).tolist() == pytest.approx(decoded, abs=1e-6)
            assert list(tw.frames.parse(frame).payload) == payload


def test_onebit_at_the_ends_of_float64_and_a_bad_frame() -> None:
    for value in (np.finfo(np.float64).max, 5e-324):
        tensor = torch.tensor([value, -value], dtype=torch.float64)
        for norm in ("l1", "l2"):
            assert torch.equal(tw.decode(tw.codec("onebit", norm=norm).encode(tensor)), tensor)
    bad = Frame("onebit", "fp32", (3,), (1.0,), int(Flags.OPTION_A), bytes([0b01000000, 0b10000000]))
    with pytest.raises(tw.FrameError, match="both zero and positive"):
        tw.decode(tw.frames.pack(bad))
