"""`randomk`: each value is sent with probability p, as x / p or as it is (DoubleSqueeze §3.2).

The receiver draws the same random numbers again, so no positions travel: the payload is the key of the numbers
(8 bytes), p in units of 2**-24 (4 bytes), and the values sent.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thinwire.codecs.base import Draws, Packed
from thinwire.codecs.randomness import Randomised, key_of
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray, compute_dtype
from thinwire.errors import ConfigError, FrameError, NonFiniteError
from thinwire.frames import Frame
from thinwire.kernels.magnitude import max_magnitude
from thinwire.kernels.moments import largest_of, require_finite_magnitude
from thinwire.kernels.uniform import chosen

UNITS = 1 << 24
"""p is a multiple of its inverse."""
MIN_P = 2**-12
"""Smaller probabilities would let a few bytes claim a tensor that fills the memory."""

_HEAD = struct.Struct("<III")


@dataclass(frozen=True, kw_only=True)
class RandomK(Randomised):
    """32·p bits a value.

    Args:
        p: the probability that a value is sent, 2**-12 … 1.
        scaled: x / p is sent, which is unbiased; False sends x, which a residual can complete.
    """

    id: ClassVar[str] = "randomk"

    p: float = 0.1
    scaled: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.p, int | float) or isinstance(self.p, bool) or not MIN_P <= self.p <= 1:
            raise ConfigError(f"randomk: p={self.p!r}; allowed are numbers from {MIN_P:g} (2**-12) to 1")
        if self.scaled not in (True, False):
            raise ConfigError(f"randomk: scaled={self.scaled!r}; allowed are True and False")
        if self.scaled and self.error_feedback:
            raise ConfigError(
                "randomk: error_feedback=True with scaled=True diverges: what is sent as x / p leaves a residual of "
                "-x·(1/p - 1), which grows at every step. Set scaled=False, or leave error feedback off"
            )

    def pack(self, flat: Flat, space: Scratch, draws: Draws | None) -> Packed:
        largest = largest_of(flat.values, None, 1.0)
        require_finite_magnitude(largest)
        kind = flat.values.dtype.type
        kept = round(self.p * UNITS)
        factor = kind(UNITS / kept if self.scaled else 1.0)
        with np.errstate(over="ignore"):
            if not np.isfinite(kind(largest) * factor):
                raise NonFiniteError(f"{largest:g} / p overflows; nothing was changed. Set scaled=False")
        key = key_of(draws)
        sent = flat.values[chosen(key, flat.values.size, kept)] * factor
        payload = space.array("randomk.payload", _HEAD.size + sent.nbytes, np.uint8)
        payload[: _HEAD.size] = np.frombuffer(_HEAD.pack(*key, kept), np.uint8)
        payload[_HEAD.size :] = sent.view(np.uint8)
        return Packed(payload)

    @classmethod
    def unpack(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        if frame.scales:
            raise FrameError(f"randomk sends no scales, {len(frame.scales)} came")
        low, high, kept = _HEAD.unpack_from(frame.payload)
        positions = chosen((low, high), frame.size, kept)
        values = np.frombuffer(frame.payload, np.uint8)[_HEAD.size :]
        if values.size != positions.size * out.itemsize:
            raise FrameError(f"randomk: the key chooses {positions.size} values, {values.size} bytes came")
        values = values.view(out.dtype)
        if not np.isfinite(max_magnitude(values)):
            raise FrameError("randomk: a value is NaN or Inf")
        if accumulate:
            out[positions] += values
        else:
            out.fill(0)
            out[positions] = values

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return _HEAD.size + frame.size * np.dtype(compute_dtype(frame.dtype)).itemsize

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
        return _HEAD.size + least * np.dtype(compute_dtype(frame.dtype)).itemsize
