"""`onebit`: the sign of each value and one scale, with a residual (DoubleSqueeze §5.1).

    v = residual + x        scale = ‖v‖₂ / √n  (or ‖v‖₁ / n)        decoded = scale where v ≥ 0, else −scale

The scale of DoubleSqueeze §3.2 (‖v‖·sign(v)) is √n too large and diverges with error feedback, so it is not offered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from thinwire.codecs.scheme import Explained, Payload, Scheme, Step
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.errors import FrameError
from thinwire.frames import Flags, Frame
from thinwire.kernels.numba.bits import pack_signs, unpack_signs
from thinwire.kernels.numba.moments import moments

ZEROS_KEPT = int(Flags.OPTION_A)
"""Two bit planes: which values are not zero, and which are positive."""


@dataclass(frozen=True, kw_only=True)
class OneBit(Scheme):
    """1 bit a value (2 where zeros are kept), with a residual.

    Args:
        norm: `"l2"` matches the sent norm to the tensor's (DoubleSqueeze §5.1); `"l1"` sends the mean magnitude,
            which is a contraction for every tensor.
        zeros: `"plus"` sends zeros as +scale; `"keep"` as zeros, with a second bit plane (the authors' code).
    """

    id: ClassVar[str] = "onebit"
    checks_finite: ClassVar[bool] = True
    keeps_residual: ClassVar[bool] = True
    option_flags: ClassVar[int] = ZEROS_KEPT
    num_scales: ClassVar[int] = 1

    norm: Literal["l2", "l1"] = "l2"
    zeros: Literal["plus", "keep"] = "plus"

    def fuses_residual(self, shape: tuple[int, ...]) -> bool:
        return self.zeros == "plus"

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        if self.zeros == "keep":
            return self._planes(flat, space)
        scale = self._scale(flat.values, flat.values.size, step)
        bits = space.array("signs.bits", -(-flat.values.size // 8), np.uint8)
        kept, factor = step.residual, step.residual_scale
        pack_signs(flat.values, bits=bits, residual=kept, residual_scale=factor, low=0.0 - scale, high=scale)
        return Payload(bits, (scale,))

    def _planes(self, flat: Flat, space: Scratch) -> Payload:
        """Returns the payload with zeros kept."""
        plane = -(-flat.values.size // 8)
        scale = self._scale(flat.values, int(np.count_nonzero(flat.values)), Step())
        bits = space.array("onebit.bits", 2 * plane, np.uint8)
        bits[:plane] = np.packbits(flat.values != 0)
        bits[plane:] = np.packbits(flat.values > 0)
        return Payload(bits, (scale,), ZEROS_KEPT)

    def _scale(self, values: FloatArray, count: int, step: Step) -> float:
        """Returns the scale over `count` values, in their dtype, never above the largest magnitude."""
        l1 = self.norm == "l1"
        residual, factor = step.residual, step.residual_scale
        sums = moments(values, residual=residual, residual_scale=factor, signed=l1, squares=not l1)
        if count == 0:
            return 0.0
        mean = (sums.positive - sums.negative) / count if l1 else math.sqrt(sums.squares / count)
        return min(float(values.dtype.type(mean * sums.unit)), sums.largest)

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        scale = frame.scales[0]
        bits = np.frombuffer(frame.payload, np.uint8)
        if not frame.flags & ZEROS_KEPT:
            unpack_signs(bits, low=0.0 - scale, high=scale, out=out, accumulate=accumulate)
            return
        plane = bits.size // 2
        sent, positive = bits[:plane], bits[plane:]
        if np.any(positive & ~sent):
            raise FrameError("onebit: a value is both zero and positive: the payload is damaged")
        values = space.array("onebit.values", out.size, out.dtype)
        unpack_signs(positive, low=0.0 - scale, high=scale, out=values, accumulate=False)
        nonzero = np.unpackbits(sent, count=out.size).view(np.bool_)
        if accumulate:
            np.add(out, values, out=out, where=nonzero)
        else:
            out.fill(0)
            np.copyto(out, values, where=nonzero)

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        keeps = bool(frame.flags & ZEROS_KEPT)
        return {
            "scale": (frame.scales[0], "the 2-norm of v over the root of n, or mean|v|: decoded as +scale and -scale"),
            "zeros kept": (keeps, "OPTION_A: a plane of bits for what is not zero, then one for what is positive"),
            "bits": ("positive where set", "without OPTION_A zeros count as positive; first value, highest bit"),
        }

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return -(-frame.size // 8) * (2 if frame.flags & ZEROS_KEPT else 1)
