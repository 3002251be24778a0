"""Careless schemes of other packages: the checks that a codec makes for them, and the payloads that it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.codecs import Between, Codec, Flat, FloatArray, Payload, Scheme, Scratch, Step
from thinwire.codecs.decoding import CheckedFrame
from thinwire.codecs.scratch import ScratchPool
from thinwire.frames import Frame, parse


@dataclass(frozen=True, kw_only=True)
class Careless(Scheme):
    """A grid with a scale that is not a float32, and without a check for NaN."""

    id: ClassVar[str] = "careless"
    num_scales: ClassVar[int] = 1
    keeps_residual: ClassVar[bool] = True
    levels: Annotated[int, Between(1, 127)] | None = 100
    wrong: str = ""

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        if self.wrong == "bytes":
            return b"12"  # type: ignore[return-value]
        if self.wrong == "floats":
            return Payload(flat.values, (0.1,))
        if self.wrong == "huge":
            return Payload(bytes(flat.values.size), (float(np.abs(flat.values).sum(dtype=np.float64)),))
        if self.wrong == "scales":
            return Payload(bytes(flat.values.size), (0.1, 0.2))
        with np.errstate(invalid="ignore"):
            return Payload(np.clip(np.rint(flat.values * 30), -100, 100).astype(np.int8).view(np.uint8), (1 / 30,))

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        values = np.frombuffer(frame.payload, np.int8) * frame.scales[0]  # in double precision
        np.copyto(out, out + values if accumulate else values)

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return frame.size


def codec(**options: Any) -> Codec:
    around = {name: options.pop(name) for name in ("nonfinite",) if name in options}
    return Codec(Careless(**options), **around)


def decoded(frame: bytes) -> torch.Tensor:
    parsed = parse(frame)
    out = torch.empty(parsed.shape)
    CheckedFrame.of(Careless, parsed, ScratchPool()).decode(out, accumulate=False)
    return out


def test_plugin_codec_refuses_nan_and_inf_before_a_change() -> None:
    context = codec().context(torch.zeros(3))
    context.encode(torch.tensor([0.01, 0.5, -0.3]))
    before = context.state_dict()["residual"]
    for bad in (float("nan"), float("inf")):
        with pytest.raises(tw.NonFiniteError):
            context.encode(torch.tensor([0.1, bad, 0.2]))
        with pytest.raises(tw.NonFiniteError):
            codec().encode(torch.tensor([bad, 1.0]))
        assert parse(codec(nonfinite="skip").encode(torch.tensor([bad, 1.0]))).non_finite
    assert torch.equal(context.state_dict()["residual"], before)


def test_sender_and_receiver_decode_equal_values() -> None:
    values = torch.linspace(-1, 1, 1001)
    context = codec().context(values)
    sent = decoded(context.encode(values))
    assert torch.equal(context.state_dict()["residual"], values - sent), "with the frame's scale, which is a float32"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("bytes", "careless: encode returned a bytes; a Payload is expected"),
        ("floats", "careless: encode returned an array of float32; uint8 is expected"),
        ("scales", "careless: encode returned 2 scales; num_scales says 1"),
    ],
)
def test_scheme_with_invalid_payload_raises_type_error(wrong: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        codec(wrong=wrong).encode(torch.ones(4))


def test_scale_not_finite_in_the_frame_is_refused_before_a_change() -> None:
    context = codec(wrong="huge").context(torch.zeros(400))
    with pytest.raises(tw.NonFiniteError, match=r"careless: a scale of 4e\+38 is more than float32 holds"):
        context.encode(torch.full((400,), 1e36))
    assert context.residual is not None and not context.residual.any()
    assert parse(codec(wrong="huge", nonfinite="skip").encode(torch.full((400,), 1e36))).non_finite


def test_decoding_into_a_tensor_saved_by_autograd_raises_in_backward() -> None:
    frame = tw.codec("fp32").encode(torch.arange(4.0))
    weights = torch.ones(4, requires_grad=True)
    saved = (weights * 1.0).exp()
    tw.decode(frame, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()  # type: ignore[no-untyped-call]


def test_errors_of_plugin_decoders_become_frame_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = codec().encode(torch.ones(4))
    for error, told in (
        (MemoryError("4 GiB"), "does not fit this machine's memory"),
        (IndexError("list index"), r"careless: the payload cannot be decoded \(IndexError: list index"),
    ):

        def stumble(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(Careless, "decode", stumble)
        with pytest.raises(tw.FrameError, match=told):
            decoded(frame)
