"""`int8`: 255 values, the 8-bit design that 3LC compares with (3LC §4.2): −127 … 127, with −128 unused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thinwire.codecs.base import Codec, Draws, Packed
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.errors import FrameError
from thinwire.frames import Frame
from thinwire.kernels.moments import largest_of, require_finite_magnitude
from thinwire.kernels.rounding import round_to_int8, scale_levels

TOP_LEVEL = 127


@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """8 bits a value: scale = max|x| / 127, q = round(x / scale). No residual unless asked for.

    Error at most scale / 2 for every value.
    """

    id: ClassVar[str] = "int8"

    def pack(self, flat: Flat, space: Scratch, draws: Draws | None) -> Packed:
        return self._pack(flat, None, space)

    def pack_residual(self, flat: Flat, residual: FloatArray, space: Scratch, draws: Draws | None) -> Packed:
        return self._pack(flat, residual, space)

    def _pack(self, flat: Flat, residual: FloatArray | None, space: Scratch) -> Packed:
        kind = flat.values.dtype.type
        largest = largest_of(flat.values, residual, self.error_scale)
        require_finite_magnitude(largest)
        scale = kind(largest) / kind(TOP_LEVEL)
        levels = space.array("int8.levels", flat.values.size, np.dtype(np.int8))
        if scale == 0:
            levels[:] = 0
            if residual is not None:
                residual *= kind(self.error_scale)
                residual += flat.values
        else:
            round_to_int8(
                flat.values, scale=scale, levels=levels, residual=residual, residual_scale=self.error_scale
            )
        return Packed(levels.view(np.uint8), (float(scale),))

    @classmethod
    def unpack(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        if len(frame.scales) != 1:
            raise FrameError(f"int8 sends one scale, {len(frame.scales)} came")
        scale_levels(np.frombuffer(frame.payload, np.int8), scale=frame.scales[0], out=out, accumulate=accumulate)

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return frame.size

    @classmethod
    def min_payload_nbytes(cls, frame: Frame) -> int:
        return frame.size
