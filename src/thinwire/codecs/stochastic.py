"""Random trits: `terngrad`, and the packed form that other ternary schemes may share.

    t = sign(x) with probability |x| / s, else 0        decoded = scale · t

With s = scale = max|x| the expectation is x itself (TernGrad, theorem 1's premise).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from thinwire.codecs.options import Between
from thinwire.codecs.scheme import Explained, Payload, Scheme, Step
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray, in_dtype
from thinwire.errors import ConfigError
from thinwire.frames import Flags, Frame
from thinwire.kernels.contract import DIGITS_PER_CODE, require_finite_magnitude
from thinwire.kernels.numba import decode_ternary
from thinwire.kernels.numba.jit import max_magnitude
from thinwire.kernels.numba.moments import moments
from thinwire.kernels.numba.stochastic import pack_stochastic, unpack_two_bit

TWO_BIT = int(Flags.OPTION_A)
"""Four trits to a byte; without it, five."""

MIN_SPREAD = 1e-6
"""Below this share of the largest magnitude σ is rounding noise, and a constant tensor is not clipped to nothing."""


class Trits(Scheme):
    """The packed form of random trits."""

    random: ClassVar[bool] = True
    option_flags: ClassVar[int] = TWO_BIT
    num_scales: ClassVar[int] = 1
    scale_is: ClassVar[str] = "max|v|"
    """The origin of the scale, as text for `explain`."""

    packing: Literal["base243", "2bit"]

    @property
    def flags(self) -> int:
        return TWO_BIT if self.packing == "2bit" else 0

    def trits(self, flat: Flat, scale: float, limit: float, step: Step, space: Scratch) -> tuple[Payload, int]:
        """Returns the payload with `scale`, and the number of trits that are not zero."""
        codes = space.array("trits.codes", -(-flat.values.size // DIGITS_PER_CODE[self.packing]), np.uint8)
        num_nonzero = pack_stochastic(
            flat.values, scale=scale, limit=limit, key=step.key, packing=self.packing, codes=codes
        )
        return Payload(codes, (scale,), self.flags), num_nonzero

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        scale = frame.scales[0]
        if frame.flags & TWO_BIT:
            unpack_two_bit(np.frombuffer(frame.payload, np.uint8), scale=scale, out=out, accumulate=accumulate)
        else:
            decode_ternary(
                frame.payload, scale=scale, out=out, zero_run=False, accumulate=accumulate, workspace=space.kernel
            )

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        packing = "2bit" if frame.flags & TWO_BIT else "base243"
        return {
            "scale": (frame.scales[0], f"{cls.scale_is}: decoded values are -scale, 0 and scale"),
            "packing": (packing, "OPTION_A: four trits to a byte, t + 1 in two bits; without it, five in base 3"),
            "values per byte": (DIGITS_PER_CODE[packing], "the first in the lowest bits, or the highest place"),
        }

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return -(-frame.size // DIGITS_PER_CODE["2bit" if frame.flags & TWO_BIT else "base243"])


@dataclass(frozen=True, kw_only=True)
class TernGrad(Trits):
    """2 bits a value (or 1.6), unbiased with respect to the clipped tensor (TernGrad §3.1, §3.3).

    Args:
        clip: c of the clipping at ±c·σ; 0 does not clip.
        sigma: σ about the `"mean"` (the paper) or about zero (`"rms"`, which keeps tensors whose mean is large).
        packing: `"2bit"` packs four trits to a byte, `"base243"` five.
        scale: s for every tensor, for scalar sharing (§3.1 equation 5): the largest of the workers' `local_scale`,
            with which their trits can be added as integers. None takes `encode`'s argument `scale`, or without it
            the tensor's own scale.
    """

    id: ClassVar[str] = "terngrad"
    checks_finite: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True
    scale_is: ClassVar[str] = "max|v| after clipping, or the scale that the workers share"

    clip: Annotated[float, Between(0)] = 2.5
    sigma: Literal["mean", "rms"] = "mean"
    packing: Literal["base243", "2bit"] = "2bit"
    scale: Annotated[float | None, Between(0)] = None

    @property
    def step_options(self) -> frozenset[str]:
        return frozenset({"scale"})

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        limit, asked = self.local_scale(flat.values), self.scale if step.scale is None else step.scale
        scale = limit if asked is None else in_dtype("terngrad: scale", asked, flat.values.dtype)
        if scale < limit:
            raise ConfigError(
                f"terngrad: scale={asked!r} is below {limit:g}, the tensor's largest magnitude after clipping; "
                "share the largest of all workers' local_scale"
            )
        return self.trits(flat, scale, limit, step, space)[0]

    def local_scale(self, values: FloatArray) -> float:
        """Returns the smaller of c·σ and the largest magnitude, in the dtype of the values."""
        if values.size == 0:
            return 0.0
        if self.clip == 0:
            largest = max_magnitude(values)
            require_finite_magnitude(largest)
            return largest
        sums = moments(values, signed=self.sigma == "mean")
        mean = (sums.positive + sums.negative) / values.size
        sigma = math.sqrt(max(0.0, sums.squares / values.size - mean * mean)) * sums.unit
        if sigma <= MIN_SPREAD * sums.largest:
            return sums.largest
        return min(float(values.dtype.type(min(self.clip * sigma, sums.largest))), sums.largest)
