"""`topk`: sends the k values of largest magnitude exactly; the others stay in the residual (DoubleSqueeze §3.2, §5.2).

The lower index is sent among equal magnitudes, and zeros never are, so that all machines select the same values.
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

_SAMPLE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """32 + ⌈log₂ n⌉ bits a value sent, or 32 and one bit a value of the tensor, with a residual.

    Args:
        fraction: of the values of each tensor, in (0, 1]; rounded up, so that every tensor sends a value.
        k: a count instead of a fraction; a smaller tensor is sent whole.
    """

    id: ClassVar[str] = "topk"
    checks_finite: ClassVar[bool] = True

    fraction: Annotated[float, Between(0, 1, above=True)] = 0.01
    k: Annotated[int | None, Between(1)] = None

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        values, size = flat.values, flat.values.size
        self.check_positions(size)
        finite_magnitude(flat)
        positions = select_top(values, self.count(size))
        body = values[positions].view(np.uint8)
        if not self.takes_bitmap(size, positions.size, body.size):
            return self.with_indices(size, positions, body, space)
        sent = np.zeros(size, np.bool_)
        sent[positions] = True
        return self.with_bitmap(np.packbits(sent), body, space)

    def count(self, size: int) -> int:
        """Returns how many of `size` > 0 values are sent."""
        # Rounded to a billionth first: 0.07 · 100 is 7.000000000000001 in floats, and means 7.
        k = self.k or math.ceil(round(self.fraction * size, 9))
        return min(max(1, k), size)


def select_top(values: FloatArray, k: int) -> Positions:
    """Returns the positions, ascending, of the k largest magnitudes; of equal ones the lower position, and no zeros.

    Example:
        >>> select_top(np.array([3.0, -3.0, 1.0, 2.0], np.float32), 2).tolist()
        [0, 1]
    """
    magnitudes = np.abs(values)
    # A sample gives a magnitude that a few more than k values reach; then only these are compared.
    sample = magnitudes[:: max(1, values.size // _SAMPLE)]
    expected = k * sample.size / values.size
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    if rank < sample.size:
        reach = np.flatnonzero(magnitudes >= np.partition(sample, sample.size - rank)[sample.size - rank])
        if reach.size >= k:
            return reach[_largest(magnitudes[reach], k)]
    return _largest(magnitudes, k)


def _largest(magnitudes: FloatArray, k: int) -> Positions:
    least = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    above = np.flatnonzero(magnitudes > least)
    equal = np.flatnonzero(magnitudes == least)[: k - above.size] if least > 0 else above[:0]
    return np.sort(np.concatenate((above, equal)))
