"""`int8`: 255 levels, the paper's "8-bit int" (3LC §4.2). −128 is not used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thinwire.codecs.base import Codec, Draws, Packed
from thinwire.codecs.floats import require_finite
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.errors import FrameError
from thinwire.frames import Frame


@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """8 bits a value: scale = max|x| / 127, q = round(x / scale). No residual unless asked for.

    Error at most scale / 2 for every value.
    """

    id: ClassVar[str] = "int8"

    def pack(self, flat: Flat, space: Scratch, draws: Draws | None) -> Packed:
        kind = flat.values.dtype.type
        scale = kind(require_finite(flat.values)) / kind(127)
        levels = space.array("int8.levels", flat.values.size, np.dtype(np.int8))
        if scale == 0:
            levels[:] = 0
        else:
            ratio = space.array("int8.ratio", flat.values.size, flat.values.dtype)
            np.divide(flat.values, scale, out=ratio)
            np.rint(ratio, out=ratio)
            np.clip(ratio, -127, 127, out=ratio)
            levels[:] = ratio
        return Packed(levels.view(np.uint8), (float(scale),))

    @classmethod
    def unpack(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        if len(frame.scales) != 1:
            raise FrameError(f"int8 sends one scale, {len(frame.scales)} came")
        levels = np.frombuffer(frame.payload, np.int8)
        scale = out.dtype.type(frame.scales[0])
        if accumulate:
            values = space.array("int8.values", out.size, out.dtype)
            np.multiply(levels, scale, out=values)
            out += values
        else:
            np.multiply(levels, scale, out=out)

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return frame.size

    @classmethod
    def min_payload_nbytes(cls, frame: Frame) -> int:
        return frame.size
