"""`dithering`: unbiased stochastic rounding to levels of one norm (DoubleSqueeze §3.2, "randomised quantisation").

level = ±floor(a), or one more with probability a − floor(a)      a = |x| / norm · s      decoded = norm · level / s
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from thinwire.codecs import Between, Flat, FloatArray, Payload, Scratch, Step
from thinwire.codecs.levels import Levels, width_of
from thinwire.codecs.scheme import Explained
from thinwire.errors import ConfigError
from thinwire.frames import Flags, Frame
from thinwire.kernels.numba.moments import moments
from thinwire_lab.kernels.levels import MAX_LEVELS, MAX_NATURAL_LEVELS, round_to_levels, value_of_levels

NATURAL = int(Flags.OPTION_A)  # levels are powers of two; without it, evenly spaced


@dataclass(frozen=True, kw_only=True)
class Dithering(Levels):
    """ceil(log2(2s + 1)) bits a value, unbiased: one norm, levels on a grid, no entropy code.

    Args:
        levels: s, without the sign and zero: 1 … 16,384, or … 64 on the natural grid.
        grid: `"linear"`, evenly spaced levels, or `"natural"`, powers of two, finer near zero.
        norm: what the last level is worth: `"max"` or `"l2"`.
    """

    id: ClassVar[str] = "dithering"
    checks_finite: ClassVar[bool] = True
    random: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True
    option_flags: ClassVar[int] = NATURAL

    levels: Annotated[int, Between(1, MAX_LEVELS)] = 7
    grid: Literal["linear", "natural"] = "linear"
    norm: Literal["max", "l2"] = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grid == "natural" and self.levels > MAX_NATURAL_LEVELS:
            raise ConfigError(
                f"dithering: levels={self.levels}; with grid='natural' allowed are whole numbers from 1 to "
                f"{MAX_NATURAL_LEVELS}"
            )

    @property
    def flags(self) -> int:
        return NATURAL if self.grid == "natural" else 0

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        values, natural = flat.values, self.grid == "natural"
        sums = moments(values, signed=False, squares=self.norm == "l2")
        norm = sums.largest
        if self.norm == "l2":
            most = float(np.finfo(values.dtype).max)
            norm = max(norm, float(values.dtype.type(min(most, float(np.sqrt(sums.squares)) * sums.unit))))
        levels = space.array("levels.levels", values.size, np.int16)
        norms = np.array([norm], values.dtype)
        round_to_levels(
            values, norms=norms, bucket=values.size, top=self.levels, natural=natural, key=step.key, out=levels
        )
        return self.packed(levels, norm, self.levels, space)

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        levels, top = cls.unpacked(frame, space)
        norms, natural = np.array(frame.scales[:1], out.dtype), bool(frame.flags & NATURAL)
        value_of_levels(levels, norms=norms, bucket=out.size, top=top, natural=natural, out=out, accumulate=accumulate)

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        top = cls.top(frame)
        return {
            "norm": (frame.scales[0], "what the last level is worth"),
            "levels": (top, "s, without the sign and zero"),
            "grid": (
                "natural" if frame.flags & NATURAL else "linear",
                "OPTION_A: level k is worth norm · 2**(k - s); without it, norm · k / s",
            ),
            "bits per level": (width_of(top), "level + s, the first value in the lowest bits of the first byte"),
        }

    @classmethod
    def most(cls, frame: Frame) -> int:
        return MAX_NATURAL_LEVELS if frame.flags & NATURAL else MAX_LEVELS
