"""`randomk`: sends each value with probability p, as x / p or as x (DoubleSqueeze §3.2).

The receiver draws the same random numbers again, so no positions travel: the payload is the key of the numbers
(8 bytes), p in units of 2**-24 (4 bytes), and the values sent.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs.options import Between
from thinwire.codecs.scheme import Explained, Payload, Scheme, Step, finite_magnitude
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray, put_some
from thinwire.errors import FrameError, NonFiniteError
from thinwire.frames import Frame
from thinwire.kernels.contract import Key
from thinwire.kernels.numba.stochastic import high_bits

UNITS = 1 << 24  # p is a multiple of its inverse
MIN_P = 2**-12  # smaller probabilities would let a few bytes claim a tensor that fills the memory

_HEAD = struct.Struct("<III")
_AT_ONCE = 1 << 18


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
            "with scaled=True it diverges: a value sent as x / p leaves a residual of -x·(1/p - 1), which grows at "
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
        sent = flat.values[kept_positions(flat.values.size, step.key, kept)] * factor
        return Payload(_HEAD.pack(*step.key, kept) + sent.tobytes())

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        low, high, kept = _HEAD.unpack_from(frame.payload)
        received = np.frombuffer(frame.payload, np.uint8)[_HEAD.size :]
        positions = kept_positions(out.size, (low, high), kept)
        if received.size != positions.size * out.itemsize:
            raise FrameError(f"randomk: the key chooses {positions.size} values, {received.size} bytes came")
        values = received.view(out.dtype)
        if not np.isfinite(values).all():
            raise FrameError("randomk: a value is NaN or Inf")
        put_some(values, positions, out, accumulate)

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
        """Returns the size eight standard deviations below the expected number of values, which no encoder reaches."""
        if len(frame.payload) < _HEAD.size:
            return _HEAD.size
        kept: int = _HEAD.unpack_from(frame.payload)[2]
        if not MIN_P * UNITS <= kept <= UNITS:
            raise FrameError(f"randomk: p = {kept}/{UNITS}; it lies between {MIN_P:g} and 1")
        expected = frame.size * kept / UNITS
        least = max(0, math.floor(expected - 8 * math.sqrt(expected) - 8))
        return _HEAD.size + least * frame.itemsize


def kept_positions(size: int, key: Key, kept: int) -> NDArray[np.int64]:
    """Returns the positions, ascending, with 24 random bits below `kept`."""
    found, random = [], np.empty(min(size, _AT_ONCE), np.int32)
    for first in range(0, size, _AT_ONCE):
        high_bits(key, first, random)
        found.append(first + np.flatnonzero(random[: size - first] < kept))
    return np.concatenate(found)
