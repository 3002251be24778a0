"""`topk`: the k values of largest magnitude, exactly; the others wait in the residual (DoubleSqueeze §3.2, §5.2).

Of equal magnitudes the lower index is sent, and zeros never are, so that all machines choose alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from thinwire.codecs.options import Between
from thinwire.codecs.scheme import Payload, Step, finite_magnitude
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.sparse import Positions, Sparse
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.kernels.numba.bits import set_bits
from thinwire.kernels.numba.select import select_top


@dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """32 + ⌈log₂ n⌉ bits a value sent, or 32 and one bit a value of the tensor, with a residual.

    Args:
        fraction: of the values of each tensor, in (0, 1]; rounded up, so that no tensor sends nothing.
        k: a count instead of a fraction; a smaller tensor is sent whole.
    """

    id: ClassVar[str] = "topk"
    checks_finite: ClassVar[bool] = True
    fuses: ClassVar[bool] = True

    fraction: Annotated[float, Between(0, 1, above=True)] = 0.01
    k: Annotated[int | None, Between(1)] = None

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        self.check_positions(flat.values.size)  # before the residual changes
        values, residual = flat.values, step.residual
        finite_magnitude(flat, step)
        if residual is not None:
            if step.residual_scale != 1:
                residual *= residual.dtype.type(step.residual_scale)
            residual += values
            values = residual
        positions = select_top(values, self.count(values.size))
        payload = self._payload(values, positions, space)
        if residual is not None:
            residual[positions] = 0
        return payload

    def _payload(self, values: FloatArray, positions: Positions, space: Scratch) -> Payload:
        size, body = values.size, values[positions].view(np.uint8)
        if not self.takes_bitmap(size, positions.size, body.size):
            return self.with_indices(size, positions, body, space)
        bitmap = space.array("topk.bitmap", -(-size // 8), np.uint8)
        set_bits(positions, bitmap)
        return self.with_bitmap(bitmap, body, space)

    def count(self, size: int) -> int:
        """How many of `size` > 0 values are sent."""
        # Rounding to a billionth first: 0.07 · 100 is 7.000000000000001 in floats, and means 7.
        k = self.k or math.ceil(round(self.fraction * size, 9))
        return min(max(1, k), size)
