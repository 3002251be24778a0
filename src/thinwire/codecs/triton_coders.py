"""The schemes with Triton kernels, and the kernels that each calls. Importing this file imports Triton.

A scheme that is not in `CODERS` runs on the CPU, and so do the options that its coder refuses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from thinwire.codecs import floats, int8, signs, threelc
from thinwire.codecs.device_coder import DeviceCoder, Entry
from thinwire.codecs.floats import BF16
from thinwire.codecs.int8 import Int8
from thinwire.codecs.scheme import Payload, Scheme
from thinwire.codecs.signs import OneBit
from thinwire.codecs.threelc import ThreeLC
from thinwire.errors import NonFiniteError
from thinwire.frames import Frame
from thinwire.kernels.contract import non_finite
from thinwire.kernels.triton.batch import NUMPY_TYPES, Pending, Sent
from thinwire.kernels.triton.dense import decode_dense, encode_bfloat, encode_int8, encode_signs
from thinwire.kernels.triton.ternary import encode_ternary
from thinwire.kernels.triton.ternary_decode import decode_ternary


def _payloads(frames: Sequence[Frame]) -> list[bytes | memoryview]:
    return [frame.payload for frame in frames]


def _scales(frames: Sequence[Frame]) -> list[float]:
    return [frame.scales[0] for frame in frames]


class _ThreeLC(DeviceCoder):
    def encodes(self, scheme: ThreeLC) -> bool:
        return scheme.batched

    def decodes(self, frame: Frame) -> bool:
        return frame.flags == threelc.ZERO_RUN

    def start(self, scheme: ThreeLC, entries: Sequence[Entry], values: list[torch.Tensor], **given: Any) -> Pending:
        return encode_ternary(values, sparsity=scheme.multiplier_at(entries[0].step), **given)

    def payload(self, scheme: ThreeLC, entry: Entry, sent: Sent) -> Payload:
        if not sent.finite:
            raise NonFiniteError(non_finite(sent.largest, scheme.multiplier_at(entry.step)))
        return Payload(sent.payload, (sent.scale,), scheme.flags)

    def decode(self, frames: Sequence[Frame], *, outs: Sequence[torch.Tensor], **into: Any) -> None:
        decode_ternary(_payloads(frames), scales=_scales(frames), outs=outs, **into)


class _BF16(DeviceCoder):
    def start(self, scheme: BF16, entries: Sequence[Entry], values: list[torch.Tensor], **given: Any) -> Pending:
        return encode_bfloat(values, most=floats.BFLOAT_MAX, **given)

    def payload(self, scheme: BF16, entry: Entry, sent: Sent) -> Payload:
        if not sent.finite:
            raise NonFiniteError(floats.ABOVE_BFLOAT if math.isfinite(sent.largest) else floats.NOT_FINITE)
        return Payload(sent.payload)

    def decode(self, frames: Sequence[Frame], *, outs: Sequence[torch.Tensor], **into: Any) -> None:
        halves = [floats.finite_halves(each, BF16.infinite) for each in frames]
        decode_dense(halves, per_byte=1, kind=np.int16, scales=[1.0] * len(outs), outs=outs, **into)


class _Int8(DeviceCoder):
    def start(self, scheme: Int8, entries: Sequence[Entry], values: list[torch.Tensor], **given: Any) -> Pending:
        largest_scale = float(int8.largest_scale(NUMPY_TYPES[values[0].dtype]))
        return encode_int8(values, largest_scale=largest_scale, **given)

    def decode(self, frames: Sequence[Frame], *, outs: Sequence[torch.Tensor], **into: Any) -> None:
        dtype = NUMPY_TYPES[outs[0].dtype]
        levels, scales = zip(*(int8.levels_of(frame, dtype) for frame in frames), strict=True)
        decode_dense(levels, per_byte=1, kind=np.int8, scales=scales, outs=outs, **into)


class _OneBit(DeviceCoder):
    def encodes(self, scheme: OneBit) -> bool:
        return scheme.zeros == "plus"

    def decodes(self, frame: Frame) -> bool:
        return not frame.flags & signs.ZEROS_KEPT

    def start(self, scheme: OneBit, entries: Sequence[Entry], values: list[torch.Tensor], **given: Any) -> Pending:
        return encode_signs(values, norm=scheme.norm, **given)

    def decode(self, frames: Sequence[Frame], *, outs: Sequence[torch.Tensor], **into: Any) -> None:
        decode_dense(_payloads(frames), per_byte=8, kind=np.uint8, scales=_scales(frames), outs=outs, **into)


CODERS: Mapping[type[Scheme], DeviceCoder] = {
    ThreeLC: _ThreeLC(),
    BF16: _BF16(),
    Int8: _Int8(),
    OneBit: _OneBit(),
}
"""Looked up by exact class; a subclass is another scheme."""
