"""A codec on the device beside itself on the CPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch

import thinwire as tw
from thinwire.codecs import encode_all


def check(codec: tw.Codec, values: list[Any], device: torch.device, *, steps: int = 2) -> None:
    """A batch of contexts on each side: the same frames and residuals for some steps, and the same decoded values."""
    ours = [codec.context(torch.from_numpy(v).to(device)) for v in values]
    theirs = [codec.context(v) for v in values]
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
