"""A codec on the device beside itself on the CPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.codecs import encode_all


def check(codec: tw.Codec, values: list[Any], device: torch.device, *, steps: int = 2) -> None:
    """A batch of contexts on each side: the same frames and residuals for some steps, and the same decoded values."""
    ours = [codec.context(torch.from_numpy(v).to(device), name=f"w{i}", seed=7) for i, v in enumerate(values)]
    theirs = [codec.context(v, name=f"w{i}", seed=7) for i, v in enumerate(values)]
    for _ in range(steps):
        frames = encode_all(ours, [torch.from_numpy(v).to(device) for v in values])
        assert frames == [context.encode(v) for context, v in zip(theirs, values, strict=True)]
        for one, other in zip(ours, theirs, strict=True):
            if one.residual is not None and other.residual is not None:
                assert one.residual.cpu().numpy().tobytes() == other.residual.numpy().tobytes()
    for frame, value in zip(frames, values, strict=True):
        for ground, accumulate in product((-0.0, 0.1), (False, True)):
            expected = np.full_like(value, ground)
            out = torch.from_numpy(expected.copy()).to(device)
            tw.decode(frame, out=expected, accumulate=accumulate)
            tw.decode(frame, out=out, accumulate=accumulate)
            assert out.cpu().numpy().tobytes() == expected.tobytes()


@np.errstate(all="ignore")  # the interpreter is NumPy, which warns of Inf - Inf
def check_refused(codec: tw.Codec, good: Any, bad: Any, told: str, device: torch.device) -> None:
    """A tensor with a value that cannot be sent is named, and no residual changes; or the codec says that it skips."""
    arrays = [good, bad]
    tensors = [torch.from_numpy(array).to(device) for array in arrays]
    contexts = [codec.context(tensor, name=f"w{i}") for i, tensor in enumerate(tensors)]
    kept = [context.residual for context in contexts if context.residual is not None]
    for residual in kept:
        residual.fill_(2.0**-20)
    with pytest.raises(tw.NonFiniteError, match=f"^w1: {told}"):
        codec.context(bad, name="w1").encode(bad)
    with pytest.raises(tw.NonFiniteError, match=f"^w1: {told}"):
        encode_all(contexts, tensors)
    assert all(set(residual.tolist()) == {2.0**-20} for residual in kept)
    assert [context.step for context in contexts] == [0, 0]
    skips = tw.codec(**{**codec.config(), "nonfinite": "skip"})
    contexts, beside = [skips.context(tensor) for tensor in tensors], skips.context(good)
    for _ in range(2):
        frames = encode_all(contexts, tensors)
        assert [tw.frames.parse(frame).non_finite for frame in frames] == [False, True]
        assert frames[0] == beside.encode(good)
    assert contexts[1].residual is None or not contexts[1].residual.any()
