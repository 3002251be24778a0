"""Random trits: `stoch3`, `terngrad`, and `qsgd-ds`.

    t = sign(x) with probability |x| / s, else 0        decoded = scale · t

With s = scale = max|x| the expectation is x itself (TernGrad, theorem 1's premise). They differ in what s is, in what
the scale is, and in how they pack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from thinwire.codecs.base import Codec, Draws, Explained, Packed, Tensor
from thinwire.codecs.randomness import Randomised, Unbiased, key_of
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray, flatten, off_host
from thinwire.errors import ConfigError, FrameError
from thinwire.frames import Flags, Frame
from thinwire.kernels.numba import decode_ternary
from thinwire.kernels.numba.moments import largest_of, moments, require_finite_magnitude
from thinwire.kernels.numba.stochastic import DIGITS_PER_CODE, pack_stochastic, unpack_two_bit

TWO_BIT = int(Flags.OPTION_A)
"""Four trits to a byte; without it, five."""

MIN_SPREAD = 1e-6
"""Below this share of the largest magnitude σ is rounding noise, and a constant tensor is not clipped to nothing."""


def scale_of(frame: Frame) -> float:
    """The frame's one scale (`FrameError` where it is another number of scales, or negative)."""
    if len(frame.scales) != 1 or frame.scales[0] < 0:
        raise FrameError(f"{frame.codec} sends one scale of at least 0; {list(frame.scales)[:4]} came")
    return frame.scales[0]


def check_covers(asked: float | None, scale: float, limit: float) -> None:
    """Raises ConfigError where the scale that `terngrad` was given (here in the type of the values) is too small."""
    if scale < limit:
        raise ConfigError(
            f"terngrad: scale={asked!r} is below {limit:g}, the tensor's largest magnitude after clipping; "
            "share the largest of all workers' local_scale"
        )


class _Trits(Codec):
    """The packed form that the three share."""

    option_flags: ClassVar[int] = int(TWO_BIT)
    packing: Literal["base243", "2bit"]
    scale_is: ClassVar[str] = "max|v|"
    """Where the scale comes from, for people."""

    def _check_packing(self) -> None:
        if self.packing not in DIGITS_PER_CODE:
            raise ConfigError(f"{self.id}: packing={self.packing!r}; allowed are 'base243' and '2bit'")

    def _trits(self, flat: Flat, scale: float, limit: float, space: Scratch, draws: Draws | None) -> tuple[Packed, int]:
        """The payload with `scale`, and how many trits are not zero."""
        codes = space.array("trits.codes", -(-flat.values.size // DIGITS_PER_CODE[self.packing]), np.uint8)
        num_nonzero = pack_stochastic(
            flat.values, scale=scale, limit=limit, key=key_of(draws), packing=self.packing, codes=codes
        )
        flags = int(TWO_BIT) if self.packing == "2bit" else 0
        return Packed(codes, (scale,), flags), num_nonzero

    @classmethod
    def unpack(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        scale = scale_of(frame)
        if frame.flags & TWO_BIT:
            unpack_two_bit(np.frombuffer(frame.payload, np.uint8), scale=scale, out=out, accumulate=accumulate)
        else:
            decode_ternary(
                frame.payload, scale=scale, out=out, zero_run=False, accumulate=accumulate, workspace=space.kernel
            )

    @classmethod
    def explain(cls, frame: Frame) -> Explained:
        packing = "2bit" if frame.flags & TWO_BIT else "base243"
        return {
            "scale": (scale_of(frame), f"{cls.scale_is}: decoded values are -scale, 0 and scale"),
            "packing": (packing, "OPTION_A: four trits to a byte, t + 1 in two bits; without it, five in base 3"),
            "values per byte": (DIGITS_PER_CODE[packing], "the first in the lowest bits, or the highest place"),
        }

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        return -(-frame.size // DIGITS_PER_CODE["2bit" if frame.flags & TWO_BIT else "base243"])

    @classmethod
    def min_payload_nbytes(cls, frame: Frame) -> int:
        return cls.max_payload_nbytes(frame)


@dataclass(frozen=True, kw_only=True)
class Stoch3(Unbiased, _Trits):
    """1.6 bits a value, unbiased: the "Stoch 3-value" design that 3LC compares with (§4.2). No zero runs.

    Args:
        packing: `"base243"` packs five trits to a byte, `"2bit"` four.
    """

    id: ClassVar[str] = "stoch3"

    packing: Literal["base243", "2bit"] = "base243"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_packing()

    def pack(self, flat: Flat, space: Scratch, draws: Draws | None) -> Packed:
        largest = largest_of(flat.values, None, 1.0)
        require_finite_magnitude(largest)
        return self._trits(flat, largest, largest, space, draws)[0]


@dataclass(frozen=True, kw_only=True)
class TernGrad(Unbiased, _Trits):
    """2 bits a value (or 1.6), unbiased with respect to the clipped tensor (TernGrad §3.1, §3.3).

    Args:
        clip: c of the clipping at ±c·σ; 0 does not clip.
        sigma: σ about the `"mean"` (the paper) or about zero (`"rms"`, which keeps tensors whose mean is large).
        packing: `"2bit"` packs four trits to a byte, `"base243"` five.
        scale: s given from outside, as scalar sharing does (§3.1 equation 5): the largest of the workers'
            `local_scale`; then their trits can be added as integers. None takes the tensor's own.
    """

    id: ClassVar[str] = "terngrad"
    scale_is: ClassVar[str] = "max|v| after clipping, or the scale that the workers share"

    clip: float = 2.5
    sigma: Literal["mean", "rms"] = "mean"
    packing: Literal["base243", "2bit"] = "2bit"
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_packing()
        if not isinstance(self.clip, int | float) or not 0 <= self.clip < math.inf:
            raise ConfigError(f"terngrad: clip={self.clip!r}; allowed are 0 (no clipping) and positive numbers")
        if self.sigma not in ("mean", "rms"):
            raise ConfigError(f"terngrad: sigma={self.sigma!r}; allowed are 'mean' and 'rms'")
        if self.scale is not None and not (isinstance(self.scale, int | float) and 0 <= self.scale < math.inf):
            raise ConfigError(f"terngrad: scale={self.scale!r}; allowed are None and finite numbers of at least 0")

    def local_scale(self, tensor: Tensor) -> float:
        """Returns the tensor's own s, the largest magnitude after clipping: what scalar sharing takes the maximum of.

        Example:
            >>> import torch, thinwire as tw
            >>> tw.codec("terngrad", clip=0).local_scale(torch.tensor([0.5, -2.0]))
            2.0
        """
        if off_host(tensor):
            from thinwire.codecs import device

            if tensor.numel() and device.takes(self, tensor.device):
                return device.local_scale(self, tensor)
        return self._limit(flatten(tensor).values)

    def pack(self, flat: Flat, space: Scratch, draws: Draws | None) -> Packed:
        limit = self._limit(flat.values)
        scale = limit if self.scale is None else float(flat.values.dtype.type(self.scale))
        check_covers(self.scale, scale, limit)
        return self._trits(flat, scale, limit, space, draws)[0]

    def _limit(self, values: FloatArray) -> float:
        """c·σ or the largest magnitude, whichever is smaller, in the type of the values."""
        if values.size == 0:
            return 0.0
        if self.clip == 0:
            largest = largest_of(values, None, 1.0)
            require_finite_magnitude(largest)
            return largest
        sums = moments(values, signed=self.sigma == "mean")
        mean = (sums.positive + sums.negative) / values.size
        sigma = math.sqrt(max(0.0, sums.squares / values.size - mean * mean)) * sums.unit
        if sigma <= MIN_SPREAD * sums.largest:
            return sums.largest
        return min(float(values.dtype.type(min(self.clip * sigma, sums.largest))), sums.largest)


@dataclass(frozen=True, kw_only=True)
class QSGDDoubleSqueeze(Randomised, _Trits):
    """1.6 bits a value: what DoubleSqueeze §5.1 calls QSGD. s = max|x|, but scale = ‖x‖₂ / ‖t‖₂, so it is biased.

    The multi-level unbiased scheme of the QSGD paper is `qsgd`.

    Args:
        packing: `"base243"` packs five trits to a byte, `"2bit"` four.
    """

    id: ClassVar[str] = "qsgd-ds"
    scale_is: ClassVar[str] = "the 2-norm of v over that of the trits"

    packing: Literal["base243", "2bit"] = "base243"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_packing()

    def pack(self, flat: Flat, space: Scratch, draws: Draws | None) -> Packed:
        sums = moments(flat.values, signed=False)
        packed, num_nonzero = self._trits(flat, sums.largest, sums.largest, space, draws)
        if num_nonzero == 0:
            return Packed(packed.payload, (0.0,), packed.flags)
        # Few trits of a tensor near the end of its type need a scale beyond it; the largest finite number then.
        most = float(np.finfo(flat.values.dtype).max)
        scale = math.sqrt(sums.squares / num_nonzero) * sums.unit
        return Packed(packed.payload, (float(flat.values.dtype.type(min(scale, most))),), packed.flags)
