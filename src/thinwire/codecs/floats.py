"""Floats in another type: `fp32`, `fp16`, `bf16`.

`fp32` is the uncompressed design: frames hold float32 values, and float64 for float64 tensors, so the codec is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.codecs.scheme import Explained, Payload, Scheme, Step
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray, put
from thinwire.errors import FrameError, NonFiniteError
from thinwire.frames import Frame
from thinwire.kernels.numba.jit import max_magnitude

_FP16_MAX = 65504.0
_FP16_ROUNDS_TO_INF = 65520.0

BFLOAT_MAX = float(np.int32(0x7F7F7FFF).view(np.float32))
"""The largest float32 that does not round to Inf in bfloat16."""

NOT_FINITE = "holds NaN or Inf; nothing was encoded and no state was changed"
ABOVE_BFLOAT = "has a value that rounds to Inf in bfloat16. Use fp32"


def require_finite(values: FloatArray) -> float:
    """Returns max|v|. Raises NonFiniteError where a value is NaN or Inf."""
    largest = float(max_magnitude(values))
    if not np.isfinite(largest):
        raise NonFiniteError(NOT_FINITE)
    return largest


def put_finite(values: NDArray[Any], out: FloatArray, accumulate: bool) -> None:
    """Stores or adds values. Raises FrameError for NaN and Inf: senders refuse them, and a model would keep them."""
    if not np.isfinite(max_magnitude(values)):
        raise FrameError("the payload holds NaN or Inf")
    put(values, out, accumulate)


def finite_halves(frame: Frame, infinite: int) -> NDArray[np.uint16]:
    """Returns the payload as 16-bit numbers. Raises FrameError for magnitudes from `infinite` on: NaN and Inf."""
    halves = np.frombuffer(frame.payload, np.uint16)
    # The largest magnitude of each sign, without a copy: as unsigned numbers, negative ones are the largest.
    if np.maximum.reduce(halves.view(np.int16)) >= infinite or np.maximum.reduce(halves) >= 0x8000 | infinite:
        raise FrameError("the payload holds NaN or Inf")
    return halves


class _Cast(Scheme):
    """A scheme whose payload is the values in another dtype."""

    num_scales: ClassVar[int] = 0
    width: ClassVar[int]
    """Bytes of a value; at most the bytes of the tensor's own values."""
    precision: ClassVar[str]
    """The precision of a value, as text for `explain`."""

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        return {"bytes per value": (min(cls.width, frame.itemsize), cls.precision)}

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return frame.size * min(cls.width, frame.itemsize)


@dataclass(frozen=True, kw_only=True)
class FP32(_Cast):
    """32 bits a value, exact (64 for float64 tensors)."""

    id: ClassVar[str] = "fp32"
    checks_finite: ClassVar[bool] = True
    width: ClassVar[int] = 8
    precision: ClassVar[str] = "exact: float32, or float64 where the tensor is"

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        require_finite(flat.values)
        return Payload(flat.values.data.cast("B"))

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        put_finite(np.frombuffer(frame.payload, out.dtype), out, accumulate)


class _Half(_Cast):
    """A cast to 16 bits, of which the highest is the sign."""

    checks_finite: ClassVar[bool] = True
    width: ClassVar[int] = 2
    kind: ClassVar[torch.dtype]
    infinite: ClassVar[int]
    """The bits of Inf."""

    def cast(self, values: FloatArray, space: Scratch) -> Payload:
        """Returns the payload of float32 values."""
        values = values if values.flags.writeable else values.copy()
        halves = space.array("floats.halves", values.size, np.int16)
        torch.from_numpy(halves).view(self.kind).copy_(torch.from_numpy(values))
        return Payload(halves.view(np.uint8))

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        halves = space.array("floats.halves", out.size, np.int16)
        halves[:] = finite_halves(frame, cls.infinite).view(np.int16)
        values = space.array("floats.values", out.size, out.dtype) if accumulate else out
        torch.from_numpy(values).copy_(torch.from_numpy(halves).view(cls.kind))
        if accumulate:
            put(values, out, True)


@dataclass(frozen=True, kw_only=True)
class FP16(_Half):
    """16 bits a value: 11 significant bits, at most 65,504; larger values are refused, not turned into Inf."""

    id: ClassVar[str] = "fp16"
    precision: ClassVar[str] = "IEEE half precision: 1 sign, 5 exponent, 10 mantissa bits; at most 65,504"
    kind: ClassVar[torch.dtype] = torch.float16
    infinite: ClassVar[int] = 0x7C00

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        largest = max_magnitude(flat.values)
        if not largest < _FP16_ROUNDS_TO_INF:
            require_finite(flat.values)
            raise NonFiniteError(
                f"has a value of magnitude {largest:g}; float16 ends at {_FP16_MAX:g}. Use bf16 or fp32"
            )
        if flat.values.dtype == np.float64:  # torch would round float64 twice
            return Payload(flat.values.astype(np.float16).view(np.uint8))
        return self.cast(flat.values, space)


@dataclass(frozen=True, kw_only=True)
class BF16(_Half):
    """16 bits a value: float32's range with 8 significant bits, rounded half to even."""

    id: ClassVar[str] = "bf16"
    precision: ClassVar[str] = "the upper half of a float32: 1 sign, 8 exponent, 7 mantissa bits"
    kind: ClassVar[torch.dtype] = torch.bfloat16
    infinite: ClassVar[int] = 0x7F80

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        with np.errstate(over="ignore"):
            values = flat.values.astype(np.float32, copy=False)
        if not max_magnitude(values) <= BFLOAT_MAX:
            require_finite(flat.values)
            raise NonFiniteError(ABOVE_BFLOAT)
        return self.cast(values, space)
