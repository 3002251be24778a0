"""Codecs and contexts for tensors on a GPU send the CPU's frames, which cross over both ways; buffers stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.kernels.triton.both_sides import check_refused
from thinwire.codecs import decode_all, encode_all
from thinwire.codecs.device import why_not_encoded
from thinwire.kernels.triton.workspace import DeviceWorkspace
from thinwire.policies.auto.levels import Limits

pytestmark = pytest.mark.gpu

CODECS = [
    tw.codec("3lc", sparsity=1.75),
    tw.codec("3lc", error_scale=0.1, entropy="zstd"),
    tw.codec("3lc", error_feedback=False),
    tw.codec("bf16"),
    tw.codec("bf16", error_feedback=True, error_scale=0.5),
    tw.codec("int8"),
    tw.codec("int8", error_feedback=True),
    tw.codec("onebit"),
    tw.codec("onebit", norm="l1", error_scale=0.5),
]
SHAPES = ((), (0,), (3, 7), (5, 1, 13), (700,))


def gradients(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def values_of(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.cpu().numpy().tobytes()


def test_contexts_on_both_sides_send_the_same_frames_for_many_steps(device: torch.device) -> None:
    for codec in CODECS:
        on_gpu = [codec.context(gradient.to(device), name=str(i)) for i, gradient in enumerate(gradients(0))]
        on_cpu = [codec.context(gradient.numpy(), name=str(i)) for i, gradient in enumerate(gradients(0))]
        for step in range(2):
            expected = [c.encode(gradient.numpy()) for c, gradient in zip(on_cpu, gradients(step), strict=True)]
            assert encode_all(on_gpu, [gradient.to(device) for gradient in gradients(step)]) == expected, codec
            for ours, theirs in zip(on_gpu, on_cpu, strict=True):
                assert ours.residual is None or ours.residual.device.type == device.type, codec
                assert values_of(ours.residual) == values_of(theirs.residual), codec
                assert (ours.step, ours.payload_nbytes) == (theirs.step, theirs.payload_nbytes), codec


def test_one_tensor_encodes_and_decodes_as_on_the_cpu(device: torch.device) -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float64)  # float32 is what contexts above encode
    for codec, dtype in zip(CODECS, dtypes * len(CODECS), strict=False):
        generator = torch.Generator().manual_seed(1)
        tensor = torch.randn((20, 30), generator=generator).to(dtype).t()  # not contiguous
        frame = codec.encode(tensor.to(device))
        if dtype == torch.bfloat16:  # which NumPy does not have
            wide = codec.encode(tensor.float().numpy())
            assert tw.frames.parse(frame).payload == tw.frames.parse(wide).payload, (codec, dtype)
        else:
            assert frame == codec.encode(tensor.numpy()), (codec, dtype)
        for out_dtype in (dtype, torch.float32):
            for accumulate in (False, True):
                ground = torch.randn(tensor.shape, generator=generator).to(out_dtype)
                out = ground.to(device, copy=True)
                assert tw.decode(frame, out=out, accumulate=accumulate) is out, (codec, dtype)
                if out_dtype == torch.bfloat16:
                    expected = ground.float() if accumulate else torch.zeros_like(ground, dtype=torch.float32)
                    decoded = torch.from_numpy(np.zeros(tensor.shape, np.float32))
                    decoded = torch.from_numpy(np.asarray(tw.decode(frame, out=decoded.numpy())))
                    expected = (expected + decoded.to(torch.bfloat16).float()).to(torch.bfloat16)
                    assert torch.equal(out.cpu(), expected), (codec, dtype)
                else:
                    beside = ground.clone().numpy()
                    tw.decode(frame, out=beside, accumulate=accumulate)
                    assert out.cpu().numpy().tobytes() == beside.tobytes(), (codec, dtype)


def test_all_settings_of_the_controller_have_kernels(device: torch.device) -> None:
    for level in Limits().levels()[1:]:
        assert level.codec is not None and why_not_encoded(level.codec.scheme, device) is None


def test_many_frames_at_once_are_decoded_as_one_by_one(device: torch.device) -> None:
    dtypes = (torch.float32, torch.float64, torch.float16)
    frames, expected, outs = [], [], []
    for at, codec in enumerate(CODECS * 2):
        for gradient in gradients(at, torch.float64 if at % 5 == 0 else torch.float32):
            ground = torch.linspace(-1, 1, max(1, gradient.numel()))[: gradient.numel()].reshape(gradient.shape)
            frames.append(codec.encode(gradient.numpy()))
            outs.append(ground.to(device=device, dtype=dtypes[at % 3], copy=True))
            expected.append(ground.to(dtype=dtypes[at % 3], copy=True))
    outs[7] = torch.stack([outs[7], outs[7]], -1)[..., 1]  # not contiguous
    outs[9] = torch.cat([outs[9][:1], outs[9]])[1:]  # not aligned
    for accumulate in (False, True):
        for frame, out in zip(frames, expected, strict=True):
            tw.decode(frame, out=out, accumulate=accumulate)
        decode_all(frames, outs, accumulate=accumulate)
        for ours, theirs in zip(outs, expected, strict=True):
            assert values_of(ours) == values_of(theirs)


def test_tensors_that_need_memory_of_their_own_are_decoded_in_pieces(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.codecs.device.MAX_PIECE", 30)
    values = [torch.full((size,), float(size)) for size in (20, 10, 1, 40, 5)]
    outs = [torch.zeros(each.shape, dtype=torch.float16, device=device) for each in values]
    decode_all([tw.codec("3lc").encode(each) for each in values], outs)
    assert [out[0].item() for out in outs] == [20, 10, 1, 40, 5]


def test_damaged_frame_leaves_its_batch_unchanged(device: torch.device) -> None:
    for codec, nonsense in ((CODECS[0], b"\xff"), (tw.codec("int8"), b"\x80")):
        frames = [codec.encode(gradient.numpy()) for gradient in gradients(5)[2:]]
        whole = tw.frames.parse(frames[1])
        frames[1] = tw.frames.pack(replace(whole, payload=nonsense * len(whole.payload)))
        outs = [torch.full(gradient.shape, 7.0, device=device) for gradient in gradients(5)[2:]]
        with pytest.raises(tw.FrameError):
            decode_all(frames, outs)
        with pytest.raises(tw.ConfigError, match="a tensor is given twice"):
            decode_all(frames[:1] * 2, [outs[0], outs[0].view(-1).view(outs[0].shape)])
        assert all(bool((out == 7).all()) for out in outs)


def test_nan_and_inf_are_refused_with_the_batch_or_skipped_alone(device: torch.device) -> None:
    bad = np.array([1.0, np.nan], np.float32)
    for codec in (tw.codec("3lc"), tw.codec("int8", error_feedback=True), tw.codec("onebit")):
        check_refused(codec, np.ones(4, np.float32), bad, "the values", device)


def test_damaged_frames_leave_the_output_alone(device: torch.device) -> None:
    for codec in CODECS:
        frame = tw.frames.parse(codec.encode(gradients(4)[4].numpy()))
        out = torch.full(frame.shape, 7.0, device=device)
        for bad in (
            replace(frame, scales=(-1.0,)),
            replace(frame, scales=(frame.scales or (1.0,)) * 2),
            replace(frame, payload=frame.payload[:-1]),
        ):
            with pytest.raises(tw.FrameError):
                tw.decode(tw.frames.pack(bad), out=out)
        assert bool((out == 7.0).all()), codec


def test_buffers_made_in_inference_mode_work_outside_of_it(device: torch.device) -> None:
    for codec in map(tw.codec, ("3lc", "int8", "onebit")):
        values, out = torch.randn(100).to(device), torch.zeros(100).to(device)
        codec.pool._idle_on.clear()
        with torch.inference_mode():
            decode_all([codec.context(values).encode(values)], [out])
        decode_all([codec.context(values).encode(values)], [out])
        assert out.any(), codec


@pytest.mark.parametrize("lacking", ["zero_run.counts", "pending.results"])
def test_out_of_memory_loses_no_gradient(device: torch.device, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
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
    with pytest.raises(TypeError, match="is a Wrapped, which has no memory"):
        context.encode(wrapped)
    with pytest.raises(tw.ConfigError, match="out is a Wrapped, which has no memory"):
        tw.decode(frame, out=wrapped)
