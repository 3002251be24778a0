"""`mqe1`, `qsgd-ds` and `stoch3` beyond the contract: the papers' numbers, and options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.codecs.contract import naming
from tests.codecs.test_stochastic import mean_of
from thinwire.frames import Flags, Frame


def test_mqe1_encodes_the_worked_example() -> None:
    v = torch.tensor([0.5, -0.2, 0.0, -0.6, 0.1])
    context = tw.codec("mqe1").context(v)
    frame = context.encode(v)
    parsed = tw.frames.parse(frame)
    assert list(parsed.payload) == [168]
    assert parsed.scales == pytest.approx((-0.4, 0.2))
    assert tw.decode(frame).tolist() == pytest.approx([0.2, -0.4, 0.2, -0.4, 0.2])
    assert context.residual is not None
    assert context.residual.tolist() == pytest.approx([0.3, 0.2, -0.2, -0.2, -0.1])
    negative = v < 0
    assert float(context.residual[negative].sum()) == pytest.approx(0, abs=1e-7)
    assert float(context.residual[~negative].sum()) == pytest.approx(0, abs=1e-7)


def test_mqe1_takes_means_along_an_axis() -> None:
    cases: list[int] = [0, 1, 2, -1]
    for axis in cases:
        with naming(f"axis={axis!r}"):
            tensor = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 5, 6)).astype(np.float32))
            decoded = tw.decode(tw.codec("mqe1", axis=axis).encode(tensor))
            alone = tw.codec("mqe1")
            for index in range(tensor.shape[axis]):
                part = tensor.select(axis, index)
                assert torch.allclose(decoded.select(axis, index), tw.decode(alone.encode(part)), rtol=1e-6, atol=0)


def test_mqe1_wrong_axis_raises_config_error() -> None:
    cases: list[Any] = [1.0, "columns", True, 32, -33]
    for axis in cases:
        with naming(f"axis={axis!r}"), pytest.raises(tw.ConfigError, match="allowed are None"):
            tw.codec("mqe1", axis=axis)


def test_mqe1_impossible_means_raise_frame_error() -> None:
    cases: list[tuple[Frame, str]] = [
        (Frame("mqe1", "fp32", (3,), (0.5, 1.0), 0, b"\0"), "positive"),
        (Frame("mqe1", "fp32", (3,), (-0.5, -1.0), 0, b"\0"), "positive"),
        (Frame("mqe1", "fp32", (3,), (-0.5,), 0, b"\0"), "2 means"),
        (Frame("mqe1", "fp32", (3,), (-0.5, 1.0), int(Flags.OPTION_A), b"\1\0"), "dimension 1"),
        (Frame("mqe1", "fp32", (3,), (-0.5, 1.0), int(Flags.OPTION_A), b"\0\0"), "6 means"),
    ]
    for frame, message in cases:
        with naming(f"frame={frame!r}, message={message!r}"), pytest.raises(tw.FrameError, match=message):
            tw.decode(tw.frames.pack(frame))


def test_qsgd_ds_is_biased_as_computed() -> None:
    mean = mean_of(tw.codec("qsgd-ds"), torch.tensor([1.0, 0.5, 0.25, 0.125]), 4000)
    assert mean.tolist() == pytest.approx([0.897, 0.378, 0.181, 0.088], abs=0.03)


def test_qsgd_ds_sends_the_norm() -> None:
    tensor = torch.from_numpy(np.random.default_rng(0).standard_normal(1000).astype(np.float32))
    assert tw.decode(tw.codec("qsgd-ds").encode(tensor)).norm().item() == pytest.approx(tensor.norm().item(), rel=1e-5)


@pytest.mark.parametrize("id", ["stoch3", "qsgd-ds"])
def test_wrong_options_raise_config_error_with_allowed_values(id: str) -> None:
    with pytest.raises(tw.ConfigError, match="allowed are"):
        tw.codec(id, packing="3bit")
