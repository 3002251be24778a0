"""Tensors on a GPU without a kernel are encoded on the CPU, with a warning (`tests/kernels/triton` has the rest).

The CPU stands for a GPU here, so that the tests run anywhere: all tensors count as off the host.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.codecs import Context, device, tensors
from thinwire.codecs.tensors import DeviceFlat

VALUES = torch.linspace(-1, 1, 100)


@pytest.fixture(autouse=True)
def _off_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "HOST_DEVICES", frozenset())


def test_device_without_kernels_warns_and_the_cpu_encodes() -> None:
    codec = tw.codec("3lc")
    expected = codec.encode(VALUES.numpy())
    with warnings.catch_warnings(record=True, action="default") as heard:
        for _ in range(3):
            assert codec.encode(VALUES) == expected
    [told] = heard
    assert "no kernels for cpu devices" in str(told.message), "a loop warns once"
    assert told.filename == __file__, "a warning names the caller's line"
    with pytest.warns(UserWarning, match="no kernels for cpu devices") as seen:
        context = codec.context(VALUES)
    assert seen[0].filename == __file__
    assert context.encode(VALUES) == expected and context.on_host


def test_meta_tensor_is_refused_without_a_warning() -> None:
    meta = VALUES.to("meta")
    context = Context(tw.codec("3lc"), DeviceFlat(VALUES, "fp32", (100,)), name="fc.bias", seed=0)
    calls = (tw.codec("3lc").encode, tw.codec("3lc").context, tw.codec("terngrad").local_scale, context.encode)
    for call in calls:
        with pytest.raises(TypeError, match=r"^(the tensor|fc\.bias) is on the meta device"):
            call(meta)


def test_codec_without_kernels_warns_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "KERNEL_DEVICES", frozenset({"cpu"}))
    codec = tw.codec("onebit", zeros="keep")
    with pytest.warns(UserWarning, match="onebit .as configured. has no GPU kernels"):
        frame = codec.encode(VALUES)
    assert frame == codec.encode(VALUES.numpy())
    out, beside = torch.zeros(100), np.zeros(100, np.float32)
    with pytest.warns(UserWarning, match="frames are decoded on the CPU") as seen:
        tw.decode(frame, out=out)
    assert seen[0].filename == __file__
    tw.decode(frame, out=beside)
    assert out.numpy().tobytes() == beside.tobytes()


def test_host_context_with_device_tensor_warns_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    context = tw.codec("3lc").context(VALUES.numpy())
    monkeypatch.setattr(device, "KERNEL_DEVICES", frozenset({"cpu"}))
    with pytest.warns(UserWarning, match="made for a tensor on the CPU and gets one on cpu"):
        frame = context.encode(VALUES)
    assert frame == tw.codec("3lc").context(VALUES.numpy()).encode(VALUES.numpy())
