"""`topk`: the k values of largest magnitude, exactly; the others wait in the residual (DoubleSqueeze §3.2, §5.2).

Of equal magnitudes the lower index is sent, and zeros never are, so that all machines choose alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thinwire.codecs.base import Draws, Packed
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.sparse import Positions, Sparse
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.errors import ConfigError
from thinwire.kernels.numba.bitmap import set_bits
from thinwire.kernels.numba.moments import largest_of, require_finite_magnitude
from thinwire.kernels.numba.select import select_top


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

    def pack(self, flat: Flat, space: Scratch, draws: Draws | None) -> Packed:
        require_finite_magnitude(largest_of(flat.values, None, 1.0))
        return self._pack(flat.values, select_top(flat.values, self.count(flat.values.size)), space)

    def pack_residual(self, flat: Flat, residual: FloatArray, space: Scratch, draws: Draws | None) -> Packed:
        require_finite_magnitude(largest_of(flat.values, residual, self.error_scale))
        if self.error_scale != 1:
            residual *= residual.dtype.type(self.error_scale)
        residual += flat.values
        positions = select_top(residual, self.count(residual.size))
        packed = self._pack(residual, positions, space)
        residual[positions] = 0
        return packed

    def _pack(self, values: FloatArray, positions: Positions, space: Scratch) -> Packed:
        size, body = values.size, values[positions].view(np.uint8)
        if not self.takes_bitmap(size, positions.size, body.size):
            return self.with_indices(size, positions, body, (), space)
        bitmap = space.array("topk.bitmap", -(-size // 8), np.uint8)
        set_bits(positions, bitmap)
        return self.with_bitmap(bitmap, body, (), space)

    def count(self, size: int) -> int:
        """How many of `size` > 0 values are sent."""
        # Rounding to a billionth first: 0.07 · 100 is 7.000000000000001 in floats, and means 7.
        k = self.k or math.ceil(round(self.fraction * size, 9))
        return min(max(1, k), size)


def check_fraction(id: str, fraction: float) -> None:
    """Raises ConfigError where `fraction` is not in (0, 1]."""
    if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 < fraction <= 1:
        raise ConfigError(f"{id}: fraction={fraction!r}; allowed are numbers above 0 and up to 1")
