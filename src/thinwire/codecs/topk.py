"""`topk`: the k values of largest magnitude, exactly; the others wait in the residual (DoubleSqueeze §3.2, §5.2).

Of equal magnitudes the lower index is sent, and zeros never are, so that all machines choose alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from thinwire.codecs.base import Draws
from thinwire.codecs.sparse import Chosen, Sparse
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import ConfigError
from thinwire.kernels.select import select_top


@dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """64 bits a value sent, or 32 and one bit a value of the tensor, with a residual.

    Args:
        fraction: of the values of each tensor, in (0, 1]; rounded up, so that no tensor sends nothing.
        k: a count instead of a fraction; a smaller tensor is sent whole.
    """

    id: ClassVar[str] = "topk"

    fraction: float = 0.01
    k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self.id, self.fraction)
        if self.k is not None and (not isinstance(self.k, int) or isinstance(self.k, bool) or self.k < 1):
            raise ConfigError(f"topk: k={self.k!r}; allowed are None (then `fraction` counts) and whole numbers from 1")

    def choose(self, values: FloatArray, draws: Draws | None) -> Chosen:
        # Rounding to a billionth first: 0.07 · 100 is 7.000000000000001 in floats, and means 7.
        k = self.k or math.ceil(round(self.fraction * values.size, 9))
        return Chosen(select_top(values, min(max(1, k), values.size)), 0.0)


def check_fraction(id: str, fraction: float) -> None:
    """Raises ConfigError where `fraction` is not in (0, 1]."""
    if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 < fraction <= 1:
        raise ConfigError(f"{id}: fraction={fraction!r}; allowed are numbers above 0 and up to 1")
