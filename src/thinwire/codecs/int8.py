"""`int8`: 255 values, the 8-bit design that 3LC compares with (3LC §4.2): −127 … 127, with −128 unused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs.scheme import Explained, Payload, Scheme, Step, finite_magnitude
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray, compute_dtype
from thinwire.errors import FrameError
from thinwire.frames import Frame
from thinwire.kernels.numba.rounding import round_to_int8, scale_levels

TOP_LEVEL = 127


def largest_scale(dtype: np.dtype[Any]) -> Any:
    """Returns the largest scale of which 127 steps stay finite; a 127th of the largest number may round up."""
    kind = dtype.type
    return np.nextafter(np.finfo(dtype).max / kind(TOP_LEVEL), kind(0))


def levels_of(frame: Frame, dtype: np.dtype[Any]) -> tuple[NDArray[np.int8], float]:
    """Returns a frame's levels and scale. Raises FrameError for those that no encoder sends."""
    if not frame.scales[0] <= largest_scale(dtype):
        raise FrameError(f"int8 sends a scale from 0 to a 127th of the range; {frame.scales[0]} came")
    levels = np.frombuffer(frame.payload, np.int8)
    if levels.min() < -TOP_LEVEL:
        raise FrameError("a level of -128 came; int8 sends -127 … 127")
    return levels, frame.scales[0]


@dataclass(frozen=True, kw_only=True)
class Int8(Scheme):
    """8 bits a value: scale = max|x| / 127, q = round(x / scale). By default it keeps no residual.

    The error of a value is at most scale / 2. A subnormal scale (max|x| below 1.5e-36 in float32) is itself rounded by
    up to the smallest number; the level multiplies that error.
    """

    id: ClassVar[str] = "int8"
    checks_finite: ClassVar[bool] = True
    num_scales: ClassVar[int] = 1
    fuses: ClassVar[bool] = True

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        kind = flat.values.dtype.type
        residual = step.residual
        scale = min(kind(finite_magnitude(flat, step)) / kind(TOP_LEVEL), largest_scale(flat.values.dtype))
        levels = space.array("int8.levels", flat.values.size, np.dtype(np.int8))
        if scale == 0:
            levels[:] = 0
            if residual is not None:
                residual *= kind(step.residual_scale)
                residual += flat.values
        else:
            round_to_int8(
                flat.values, scale=scale, levels=levels, residual=residual, residual_scale=step.residual_scale
            )
        return Payload(levels.view(np.uint8), (float(scale),))

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        levels, scale = levels_of(frame, out.dtype)
        scale_levels(levels, scale=scale, out=out, accumulate=accumulate)

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        levels, scale = levels_of(frame, np.dtype(compute_dtype(frame.dtype)))
        return {
            "scale": (scale, "max|v| / 127: decoded values are scale · q"),
            "levels": ([int(levels.min()), int(levels.max())], "the smallest and the largest q, of -127 … 127"),
        }

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return frame.size
