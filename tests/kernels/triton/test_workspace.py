"""Buffers that grow, stay, and carry data over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.codecs import decode_all
from thinwire.kernels.triton.workspace import DeviceWorkspace

pytestmark = pytest.mark.gpu


def test_what_was_made_in_inference_mode_serves_outside_of_it(device: torch.device) -> None:
    for codec in map(tw.codec, ("3lc", "int8", "onebit")):
        values, out = torch.randn(100).to(device), torch.zeros(100).to(device)
        codec.pool._idle_on.clear()
        with torch.inference_mode():
            decode_all([codec.context(values).encode(values)], [out])
        decode_all([codec.context(values).encode(values)], [out])
        assert out.any(), codec


@pytest.mark.parametrize("lacking", ["zero_run.counts", "pending.facts"])
def test_what_does_not_fit_the_memory_is_not_lost(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    codec = tw.codec("3lc")
    values = torch.randn(100).to(device)
    context, expected = codec.context(values), codec.context(values)
    codec.pool._idle_on.clear()
    whole = DeviceWorkspace.array

    def full(self: DeviceWorkspace, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        if name == lacking:
            raise torch.OutOfMemoryError("no memory left")
        return whole(self, name, size, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceWorkspace, "array", full)
        with pytest.raises(torch.OutOfMemoryError):
            context.encode(values)
    assert context.step == 0 and context.residual is not None and not context.residual.any()
    assert context.encode(values) == expected.encode(values)


def test_a_tensor_without_memory_of_its_own_is_refused(device: torch.device) -> None:
    class Wrapped(torch.Tensor):
        """As a DTensor is: it holds another tensor, and has no memory."""

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            raise AssertionError("nothing is computed with it")

    wrapped: torch.Tensor = torch.Tensor._make_wrapper_subclass(Wrapped, (40,), device=device)
    codec = tw.codec("3lc")
    context, frame = codec.context(torch.zeros(40).to(device)), codec.encode(np.ones(40, np.float32))
    with pytest.raises(TypeError, match="is a Wrapped, which has no memory of its own"):
        context.encode(wrapped)
    with pytest.raises(tw.ConfigError, match="out is a Wrapped, which has no memory of its own"):
        tw.decode(frame, out=wrapped)
