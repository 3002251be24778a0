"""Many 3LC tensors of a GPU by one call each way: the frames, residuals and sums of one call for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.codecs import Context
from thinwire.codecs.ternary_device import DeviceTernary

pytestmark = pytest.mark.gpu

SIZES = (1, 5, 7, 700, 1203)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"sparsity": 1.75},
    {"entropy": "zstd", "error_scale": 0.5},
    {"error_feedback": False},
)


def drawn(seed: int, device: torch.device) -> torch.Tensor:
    """All tensors in one, each behind a gap, so that they begin anywhere."""
    return torch.randn(sum(SIZES) + len(SIZES), generator=torch.Generator().manual_seed(seed)).to(device)


def pieces(flat: torch.Tensor) -> list[torch.Tensor]:
    ends = np.cumsum([size + 1 for size in SIZES]).tolist()
    return [flat[end - size : end] for end, size in zip(ends, SIZES, strict=True)]


def places(flat: torch.Tensor) -> Any:
    return np.array([each.data_ptr() for each in pieces(flat)], np.int64)


def contexts(options: dict[str, Any], device: torch.device) -> list[Context]:
    codec = tw.codec("3lc", **options)
    return [codec.context(each, name=str(each.numel())) for each in pieces(drawn(0, device))]


def test_frames_residuals_and_sums_are_those_of_one_at_a_time(device: torch.device) -> None:
    for options in OPTIONS:
        together, apart = contexts(options, device), contexts(options, device)
        batch = DeviceTernary(together)
        assert batch.encodes
        for step in range(3):
            flat = drawn(step, device)
            frames = batch.encode_on(device, places(flat))
            assert frames == [context.encode(each) for context, each in zip(apart, pieces(flat), strict=True)]
            for ours, theirs in zip(together, apart, strict=True):
                assert (ours.step, ours.payload_nbytes) == (theirs.step, theirs.payload_nbytes)
                assert (ours.residual is None) == (theirs.residual is None)
                assert ours.residual is None or theirs.residual is None or torch.equal(ours.residual, theirs.residual)
            out, expected = drawn(7, device), drawn(7, device)
            adds = np.array([True, False, True, False, True])
            nbytes = batch.decode_on(device, frames, places(out), adds)
            for frame, each, add in zip(frames, pieces(expected), adds.tolist(), strict=True):
                tw.decode(frame, out=each, accumulate=add)
            assert torch.equal(out, expected)
            assert nbytes == [context.payload_nbytes for context in together]


def test_what_it_does_not_take_is_left(device: torch.device) -> None:
    batch, flat = DeviceTernary(contexts({}, device)), drawn(1, device)
    frames = batch.encode_on(device, places(flat))
    assert frames is not None
    frames[0], frames[1], frames[2] = b"", tw.codec("int8").encode(np.ones(5, np.float32)), frames[3]
    frames[3] = frames[3][:-1] + bytes([frames[3][-1] ^ 1])
    out = torch.full_like(flat, 7.0)
    done = batch.decode_on(device, frames, places(out), np.zeros(5, np.bool_))
    assert [nbytes > 0 for nbytes in done] == 4 * [False] + [True]
    assert bool((out[: -SIZES[-1]] == 7).all())
    assert batch.decode_on(device, [b""] * 5, places(out), np.zeros(5, np.bool_)) == [0] * 5


def test_nan_leaves_all_residuals_alone(device: torch.device) -> None:
    made = contexts({}, device)
    batch, flat = DeviceTernary(made), drawn(1, device)
    assert batch.encode_on(device, places(flat)) is not None
    before = [context.residual.clone() for context in made if context.residual is not None]
    flat[-3] = torch.nan
    assert batch.encode_on(device, places(flat)) is None
    for context, residual in zip(made, before, strict=True):
        assert context.step == 1 and context.residual is not None and torch.equal(context.residual, residual)
