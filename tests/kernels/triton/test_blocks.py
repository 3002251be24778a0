"""blocktopk on the device beside the CPU's codec: the same values of every block, the same frames and residuals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.kernels.triton.both_sides import check, check_refused
from thinwire.kernels.triton import blocks

pytestmark = pytest.mark.gpu

CODECS = [
    tw.codec("blocktopk", block=64, k=5),
    tw.codec("blocktopk", block=100, k=33, bits=1, error_scale=0.3),
    tw.codec("blocktopk", block=32, k=32, bits=8, layout="tiles"),
    tw.codec("blocktopk", block=300, k=7, bits=3, layout="tiles", error_feedback=False),
]
# The interpreter takes seconds for each.
CASES = [
    *((codec, np.float32) for codec in CODECS[::2]),
    *((codec, np.float64) for codec in (CODECS[0], *CODECS[1::2])),
]
SHAPES = ((1,), (64,), (65,), (300,), (20, 24), (6, 5, 10), (1, 150))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Blocks of several chunks, without much to interpret."""
    if device.type == "cpu":
        monkeypatch.setattr(blocks, "CHUNK", 64)
        monkeypatch.setattr(blocks, "_LEAST_CHUNK", 32)


def test_all_shapes_and_every_share_of_zeros(device: torch.device) -> None:
    for codec, dtype in CASES:
        random = np.random.default_rng(1)
        values = []
        for at, shape in enumerate(SHAPES):
            drawn = random.standard_normal(shape).astype(dtype)
            drawn[random.random(shape) < (0.0, 0.95, 0.5, 1.0, 0.0)[at % 5]] = 0.0
            values.append(drawn)
        check(codec, values, device, steps=1)


def test_of_equal_magnitudes_the_first_of_each_block_are_sent(device: torch.device) -> None:
    values = np.tile(np.array([1.0, -1.0, 0.5, 0.0], np.float32), 100)
    values[300] = 2.0
    for k in (1, 2, 33, 64, 65, 128):
        check(tw.codec("blocktopk", block=128, k=k), [values, -values], device, steps=1)
        check(tw.codec("blocktopk", block=128, k=k, layout="tiles"), [values.reshape(20, 20)], device, steps=1)


def test_what_is_refused_leaves_residuals_alone(device: torch.device) -> None:
    for value, told in ((np.nan, "the values"), (np.inf, "the values"), (-3e38, r"largest magnitude 3e\+38 is above")):
        bad = np.ones(400, np.float32)
        bad[200] = value
        check_refused(CODECS[0], np.ones(400, np.float32), bad, told, device)


def test_coefficients_are_left_to_the_cpu(device: torch.device) -> None:
    codec = tw.codec("blocktopk", block=64, k=5, layout="tiles", transform="dct")
    values = np.random.default_rng(6).standard_normal((16, 16)).astype(np.float32)
    with pytest.warns(UserWarning, match="blocktopk .as configured. has no GPU kernels"):
        frame = codec.encode(torch.from_numpy(values).to(device))
    assert frame == codec.encode(values)
    out, beside = torch.zeros((16, 16), device=device), np.zeros((16, 16), np.float32)
    with pytest.warns(UserWarning, match="blocktopk .as configured by the sender. has no GPU kernels"):
        tw.decode(frame, out=out)
    tw.decode(frame, out=beside)
    assert out.cpu().numpy().tobytes() == beside.tobytes()
