"""votes on the device beside the CPU's codec: every width, every border between bytes, and what is no vote."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.codecs.levels import MAX_WORKERS

pytestmark = pytest.mark.gpu

WORKERS = (1, 2, 4, 7, 64, 127, 128, 1000, 40_000, MAX_WORKERS)


def check(frame: bytes, dtype: Any, device: torch.device) -> None:
    shape = tw.frames.parse(frame).shape
    for accumulate in (False, True):
        expected = np.full(shape, 0.1, dtype)
        out = torch.from_numpy(expected.copy()).to(device)
        tw.decode(frame, out=expected, accumulate=accumulate)
        assert tw.decode(frame, out=out, accumulate=accumulate) is out
        assert out.cpu().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_votes_of_every_width_decode_as_on_the_cpu(dtype: Any, device: torch.device) -> None:
    random = np.random.default_rng(1)
    for workers, size in zip(WORKERS * 2, (1, 7, 8, 9, 63, 64, 65, 300, 5, 1000, 4097), strict=False):
        votes = random.integers(-workers, workers + 1, size)
        votes[0] = -workers
        values = (votes / workers * random.uniform(0.1, 3)).astype(dtype)
        check(tw.codec("votes", workers=workers).encode(values), dtype, device)


@pytest.mark.parametrize(
    ("payload", "scales", "message"),
    [
        (b"\xff\xff\x00", (1.0, 2.0), "level 5 of 2"),
        (b"\x00\x00\x80", (1.0, 2.0), "padding bits"),
        (b"\x00\x00", (1.0, 2.0), "payload bytes"),
    ],
)
def test_damaged_votes_leave_the_output_alone(
    payload: bytes, scales: tuple[float, ...], message: str, device: torch.device
) -> None:
    out = torch.full((7,), 7.0, device=device)
    with pytest.raises(tw.FrameError, match=message):
        tw.decode(tw.frames.pack(tw.frames.Frame("votes", "fp32", (7,), scales, 0, payload)), out=out)
    assert out.tolist() == [7.0] * 7
