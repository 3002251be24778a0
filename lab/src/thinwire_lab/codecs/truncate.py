"""`truncate`: zeroes the k low mantissa bits and does not send them ("clipping", DoubleSqueeze §3.2).

That rounds toward zero: |error| < 2**(k − 23)·|x| (2**(k − 52) for float64 tensors). It sends the sign, the exponent
and the upper mantissa unchanged, 32 − k bits, the lowest bit first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from thinwire.codecs import Between, Flat, FloatArray, Payload, Scheme, Scratch, Step, finite_magnitude
from thinwire.codecs.floats import put_finite
from thinwire.codecs.scheme import Explained
from thinwire.errors import FrameError
from thinwire.frames import Frame
from thinwire.kernels.numba.integers import pack_integers, packed_nbytes, unpack_integers

MANTISSA_BITS = 23


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
        payload = space.array("truncate.payload", _nbytes(values.size, values.itemsize, self.bits), np.uint8)
        payload[0] = self.bits
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
        put_finite(bits.view(out.dtype), out, accumulate)

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
