"""A new codec, four bits a value: `tw.codec("nibble")` with the entry point of docs/extending.md, and in any design."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thinwire.codecs import Flat, FloatArray, Payload, Scheme, Scratch, Step, finite_magnitude
from thinwire.errors import FrameError
from thinwire.frames import Frame


@dataclass(frozen=True, kw_only=True)
class Nibble(Scheme):
    """q = round(7·x / max|x|) + 8, in 1 … 15, two to a byte; a last one alone has an 8, a zero, beside it."""

    id: ClassVar[str] = "nibble"
    keeps_residual: ClassVar[bool] = True
    num_scales: ClassVar[int] = 1

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        largest = finite_magnitude(flat)  # raises before anything has changed
        levels = np.full(flat.values.size + flat.values.size % 2, 8, np.uint8)
        levels[: flat.values.size] += np.rint(flat.values / (largest or 1) * 7).astype(np.int8).view(np.uint8)
        return Payload((levels[::2] << 4 | levels[1::2]).astype(np.uint8), (float(largest),))

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        packed = np.frombuffer(frame.payload, np.uint8)
        levels = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
        if not levels.all() or (out.size % 2 and levels[-1] != 8):
            raise FrameError("nibble sends levels 1 … 15, and 8 beside a last one by itself")
        # Divided first: a scale of the largest number there is would overflow.
        values = (levels[: out.size].astype(out.dtype) - 8) / 7 * out.dtype.type(frame.scales[0])
        np.copyto(out, out + values if accumulate else values)

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return -(-frame.size // 2)
