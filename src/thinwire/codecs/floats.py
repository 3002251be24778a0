"""Floats with fewer bits: `fp32`, `fp16`, `bf16` by a cast, `truncate` by leaving out low bits of the mantissa.

`fp32` is the uncompressed design: values travel as float32, and float64 tensors as float64, so nothing is lost.

`truncate` ("clipping", DoubleSqueeze §3.2) zeroes the k low mantissa bits and does not send them. That rounds toward
zero: |error| < 2**(k − 23)·|x| (2**(k − 52) for float64 tensors). What remains travels as it is: the sign, the exponent
and the upper mantissa, 32 − k bits, the lowest bit first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from thinwire.codecs.options import Between
from thinwire.codecs.scheme import Explained, Payload, Scheme, Step, finite_magnitude
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.errors import FrameError, NonFiniteError
from thinwire.frames import Frame
from thinwire.kernels.numba.casts import BFLOAT_MAX, to_bfloat, to_half, upper_halves, widen
from thinwire.kernels.numba.integers import pack_integers, packed_nbytes, unpack_integers
from thinwire.kernels.numba.jit import max_magnitude

MANTISSA_BITS = 23
HALF = 16
"""Dropping so many bits of a float32 leaves its upper half, which has kernels of its own."""

_FP16_MAX = 65504.0
_FP16_ROUNDS_TO_INF = 65520.0

NOT_FINITE = "holds NaN or Inf; nothing was encoded and no state was changed"
ABOVE_BFLOAT = "has a value that rounds to Inf in bfloat16. Use fp32"


def require_finite(values: FloatArray) -> float:
    """Returns max|v|. Raises NonFiniteError where a value is NaN or Inf."""
    largest = float(max_magnitude(values))
    if not np.isfinite(largest):
        raise NonFiniteError(NOT_FINITE)
    return largest


def _put(values: FloatArray, out: FloatArray, accumulate: bool) -> None:
    """Stores or adds finite values: no sender of ours lets NaN or Inf out, and they would spread over the model."""
    if not np.isfinite(max_magnitude(values)):
        raise FrameError("the payload holds NaN or Inf")
    if accumulate:
        out += values
    else:
        out[:] = values


class _Cast(Scheme):
    """A scheme whose payload is the values in another dtype."""

    num_scales: ClassVar[int] = 0
    width: ClassVar[int]
    """Bytes of a value, at most those that it has."""
    precision: ClassVar[str]
    """What a value keeps, for people."""

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
        _put(np.frombuffer(frame.payload, out.dtype), out, accumulate)


@dataclass(frozen=True, kw_only=True)
class FP16(_Cast):
    """16 bits a value: 11 significant bits, at most 65,504; larger values are refused, not turned into Inf."""

    id: ClassVar[str] = "fp16"
    checks_finite: ClassVar[bool] = True
    width: ClassVar[int] = 2
    precision: ClassVar[str] = "IEEE half precision: 1 sign, 5 exponent, 10 mantissa bits; at most 65,504"

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        halves = space.array("floats.halves", flat.values.size, np.uint16)
        largest = to_half(flat.values, halves)
        if not largest < _FP16_ROUNDS_TO_INF:
            require_finite(flat.values)
            raise NonFiniteError(
                f"has a value of magnitude {largest:g}; float16 ends at {_FP16_MAX:g}. Use bf16 or fp32"
            )
        return Payload(halves.view(np.uint8))

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        widen(frame.payload, kind="half", out=out, accumulate=accumulate)


@dataclass(frozen=True, kw_only=True)
class BF16(_Cast):
    """16 bits a value: float32's range with 8 significant bits, rounded half to even."""

    id: ClassVar[str] = "bf16"
    checks_finite: ClassVar[bool] = True
    width: ClassVar[int] = 2
    precision: ClassVar[str] = "the upper half of a float32: 1 sign, 8 exponent, 7 mantissa bits"

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        halves = space.array("floats.halves", flat.values.size, np.uint16)
        if not to_bfloat(flat.values, halves) <= BFLOAT_MAX:
            require_finite(flat.values)
            raise NonFiniteError(ABOVE_BFLOAT)
        return Payload(halves.view(np.uint8))

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        widen(frame.payload, kind="bfloat", out=out, accumulate=accumulate)


@dataclass(frozen=True, kw_only=True)
class Truncate(Scheme):
    """32 − k bits a value (64 − k for float64 tensors).

    The payload is k (1 byte), then the remaining bits; for float64 tensors their lower 32, then the others.

    Args:
        bits: k, how many low mantissa bits are dropped: 0 … 23. 16 leaves bfloat16 without rounding.
    """

    id: ClassVar[str] = "truncate"
    checks_finite: ClassVar[bool] = True
    num_scales: ClassVar[int] = 0

    bits: Annotated[int, Between(0, MANTISSA_BITS)] = 16

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        values = flat.values
        finite_magnitude(flat)
        # One byte is left out in front, so that what follows k begins at an even address.
        payload = space.array("truncate.payload", 1 + _nbytes(values.size, values.itemsize, self.bits), np.uint8)[1:]
        payload[0] = self.bits
        if values.itemsize == 4 and self.bits == HALF:
            upper_halves(values, payload[1:].view(np.uint16))
            return Payload(payload)
        at = 1
        for (word, shift), width in zip(_words(values, self.bits), _widths(values.itemsize, self.bits), strict=True):
            room = space.array("truncate.words", -(-values.size * width // 32), np.uint32)
            packed = pack_integers(word, shift=shift, width=width, words=room)
            payload[at : at + packed.size] = packed
            at += packed.size
        return Payload(payload)

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        dropped, payload = frame.payload[0], memoryview(frame.payload)[1:]
        if dropped > MANTISSA_BITS or len(frame.payload) != _nbytes(out.size, out.itemsize, dropped):
            raise FrameError(f"truncate: {len(frame.payload)} bytes for {out.size} values without {dropped} bits")
        if out.itemsize == 4 and dropped == HALF:
            widen(payload, kind="bfloat", out=out, accumulate=accumulate)
            return
        whole: Any = np.uint64 if out.itemsize == 8 else np.uint32
        bits = space.array("truncate.bits", out.size, whole)
        bits.fill(0)
        shift = 0
        for width in _widths(out.itemsize, dropped):
            nbytes = packed_nbytes(out.size, width)
            part = space.array("truncate.part", out.size, np.int32)
            unpack_integers(payload[:nbytes], width=width, out=part)
            bits |= part.view(np.uint32).astype(whole) << whole(shift)
            payload, shift = payload[nbytes:], shift + width
        bits <<= whole(dropped)
        _put(bits.view(out.dtype), out, accumulate)

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        dropped, width = frame.payload[0], 64 if frame.dtype == "fp64" else 32
        return {
            "bits dropped": (dropped, "k, the payload's first byte: low bits of the mantissa, zero when decoded"),
            "bits kept": (width - dropped, "sign, exponent and upper mantissa of each value, lowest bit first"),
        }

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return _nbytes(frame.size, frame.itemsize, 0)

    @classmethod
    def min_payload_nbytes(cls, frame: Frame) -> int:
        return _nbytes(frame.size, frame.itemsize, MANTISSA_BITS)


def _widths(itemsize: int, dropped: int) -> tuple[int, ...]:
    """Bits of the words that the remaining bits of a value are cut into, the lower one first."""
    return (32 - dropped,) if itemsize == 4 else (32, 32 - dropped)


def _words(values: Any, dropped: int) -> tuple[tuple[Any, int], ...]:
    """The words, and how many of their low bits are left out."""
    if values.itemsize == 4:
        return ((values.view(np.uint32), dropped),)
    kept = values.view(np.uint64) >> np.uint64(dropped)
    return ((kept.astype(np.uint32), 0), ((kept >> np.uint64(32)).astype(np.uint32), 0))


def _nbytes(size: int, itemsize: int, dropped: int) -> int:
    return 1 + sum(packed_nbytes(size, width) for width in _widths(itemsize, dropped))
