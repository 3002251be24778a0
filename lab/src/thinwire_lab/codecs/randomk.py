"""`randomk`: each value is sent with probability p, as x / p or as it is (DoubleSqueeze §3.2).

The receiver draws the same random numbers again, so no positions travel: the payload is the key of the numbers
(8 bytes), p in units of 2**-24 (4 bytes), and the values sent.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from thinwire.codecs.options import Between
from thinwire.codecs.scheme import Explained, Payload, Scheme, Step, finite_magnitude
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.errors import FrameError, NonFiniteError
from thinwire.frames import Frame
from thinwire.kernels.numba.jit import max_magnitude
from thinwire_lab.kernels.thinning import collect_kept, kept_positions

UNITS = 1 << 24  # p is a multiple of its inverse
MIN_P = 2**-12  # smaller probabilities would let a few bytes claim a tensor that fills the memory

_HEAD = struct.Struct("<III")


@dataclass(frozen=True, kw_only=True)
class RandomK(Scheme):
    """32·p bits a value.

    Args:
        p: the probability that a value is sent, 2**-12 … 1.
        scaled: x / p is sent, which is unbiased; False sends x, which a residual can complete.
    """

    id: ClassVar[str] = "randomk"
    checks_finite: ClassVar[bool] = True
    random: ClassVar[bool] = True
    num_scales: ClassVar[int] = 0

    p: Annotated[float, Between(MIN_P, 1)] = 0.1
    scaled: bool = True

    def why_no_residual(self) -> str | None:
        if not self.scaled:
            return None
        return (
            "with scaled=True it diverges: what is sent as x / p leaves a residual of -x·(1/p - 1), which grows at "
            "every step. Set scaled=False, or leave error feedback off"
        )

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        largest = finite_magnitude(flat)
        kind = flat.values.dtype.type
        kept = round(self.p * UNITS)
        factor = kind(UNITS / kept if self.scaled else 1.0)
        with np.errstate(over="ignore"):
            if not np.isfinite(kind(largest) * factor):
                raise NonFiniteError(f"{largest:g} / p overflows; nothing was changed. Set scaled=False")
        key = step.key
        size, itemsize = flat.values.size, flat.values.itemsize
        # The values begin where their type may, the head before them.
        held = space.array("randomk.payload", 16 + (size + 1) * itemsize, np.uint8)
        sent = held[16:].view(flat.values.dtype)
        count = collect_kept(flat.values, key=key, kept=kept, factor=factor, sent=sent)
        payload = held[16 - _HEAD.size : 16 + count * itemsize]
        payload[: _HEAD.size] = np.frombuffer(_HEAD.pack(*key, kept), np.uint8)
        return Payload(payload)

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        low, high, kept = _HEAD.unpack_from(frame.payload)
        received = np.frombuffer(frame.payload, np.uint8)[_HEAD.size :]
        count, left = divmod(received.size, out.itemsize)
        index = np.int32 if out.size < 1 << 31 else np.int64
        positions = space.array("randomk.positions", count + 1, index)
        chosen = kept_positions(out.size, key=(low, high), kept=kept, positions=positions)
        if left or chosen != count:
            raise FrameError(f"randomk: the key chooses {chosen} values, {received.size} bytes came")
        values = space.array("randomk.values", count, out.dtype)
        values[:] = received.view(out.dtype)
        if not np.isfinite(max_magnitude(values)):
            raise FrameError("randomk: a value is NaN or Inf")
        if accumulate:
            out[positions[:count]] += values
        else:
            out.fill(0)
            out[positions[:count]] = values

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        low, high, kept = _HEAD.unpack_from(frame.payload)
        sent = (len(frame.payload) - _HEAD.size) // frame.itemsize
        return {
            "key": ([low, high], "of the random numbers that chose; the receiver draws them again"),
            "p": (kept / UNITS, f"the probability that a value is sent: {kept} / 2**24"),
            "values sent": (sent, f"of {frame.size}, in full precision, divided by p where the sender scaled them"),
        }

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return _HEAD.size + frame.size * frame.itemsize

    @classmethod
    def min_payload_nbytes(cls, frame: Frame) -> int:
        """Eight standard deviations below the expected number of values: no encoder ever gets there."""
        if len(frame.payload) < _HEAD.size:
            return _HEAD.size
        kept: int = _HEAD.unpack_from(frame.payload)[2]
        if not MIN_P * UNITS <= kept <= UNITS:
            raise FrameError(f"randomk: p = {kept}/{UNITS}; it lies between {MIN_P:g} and 1")
        expected = frame.size * kept / UNITS
        least = max(0, math.floor(expected - 8 * math.sqrt(expected) - 8))
        return _HEAD.size + least * frame.itemsize
