"""Random trits that papers compare with: `stoch3` (3LC §4.2) and `qsgd-ds` (DoubleSqueeze §5.1).

    t = sign(x) with probability |x| / max|x|, else 0        decoded = scale · t

They differ in the scale: max|x|, which is unbiased, or the one that keeps the norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from thinwire.codecs import Flat, Payload, Scratch, Step, finite_magnitude
from thinwire.codecs.stochastic import Trits
from thinwire.kernels.numba.moments import moments


@dataclass(frozen=True, kw_only=True)
class Stoch3(Trits):
    """1.6 bits a value, unbiased: the "Stoch 3-value" design that 3LC compares with (§4.2). No zero runs.

    Args:
        packing: `"base243"` packs five trits to a byte, `"2bit"` four.
    """

    id: ClassVar[str] = "stoch3"
    checks_finite: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True

    packing: Literal["base243", "2bit"] = "base243"

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        largest = finite_magnitude(flat)
        return self.trits(flat, largest, largest, step, space)[0]


@dataclass(frozen=True, kw_only=True)
class QSGDDoubleSqueeze(Trits):
    """1.6 bits a value: what DoubleSqueeze §5.1 calls QSGD. s = max|x|, but scale = ‖x‖₂ / ‖t‖₂, so it is biased.

    The multi-level unbiased scheme of the QSGD paper is `qsgd`.

    Args:
        packing: `"base243"` packs five trits to a byte, `"2bit"` four.
    """

    id: ClassVar[str] = "qsgd-ds"
    checks_finite: ClassVar[bool] = True
    scale_is: ClassVar[str] = "the 2-norm of v over that of the trits"

    packing: Literal["base243", "2bit"] = "base243"

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        sums = moments(flat.values, signed=False)
        payload, num_nonzero = self.trits(flat, sums.largest, sums.largest, step, space)
        if num_nonzero == 0:
            return payload._replace(scales=(0.0,))
        # Few trits of a tensor near the end of its type need a scale beyond it; the largest finite number then.
        most = float(np.finfo(flat.values.dtype).max)
        scale = math.sqrt(sums.squares / num_nonzero) * sums.unit
        return payload._replace(scales=(float(flat.values.dtype.type(min(scale, most))),))
