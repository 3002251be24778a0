"""Sums of decoded gradients, for both modes: a server's over its workers, an owner's over the other ranks.

The caller gives the gradients of one sender after the other, in an order that it fixes: floating-point addition is not
associative, and two runs with one seed must give the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from thinwire.codecs.decoding import CheckedFrame
from thinwire.codecs.tensors import FloatArray
from thinwire.packets import BatchedTensor

Values: TypeAlias = FloatArray | torch.Tensor
"""Flat values: an array on the host, a tensor on a GPU."""

Gradient: TypeAlias = CheckedFrame | BatchedTensor
"""One sender's gradient of one tensor: a frame that was checked, or values from a batch."""


class GradientSums:
    """The sums of some tensors' gradients.

    Args:
        sums: flat float32 or float64, one for each tensor; filled in place.
        contributions: how many gradients they hold already. At 0 the first one overwrites them.

    Example:
        >>> total = GradientSums([np.ones(2, np.float32)], contributions=1)
        >>> total.add([BatchedTensor(np.array([3, 5], np.float32))])
        >>> total.average(2)
        >>> total.sums[0].tolist(), total.contributions
        ([2.0, 3.0], [2])
    """

    __slots__ = ("contributions", "sums")

    def __init__(self, sums: Sequence[Values], contributions: int = 0) -> None:
        self.sums = sums
        self.contributions = [contributions] * len(sums)

    def add(self, gradients: Sequence[Gradient | None]) -> None:
        """Adds one sender's gradients, one for each tensor; None where it has none.

        Raises:
            FrameError: a payload is damaged. Its sum is what it was; those of tensors before it have changed.
        """
        for index, (total, gradient) in enumerate(zip(self.sums, gradients, strict=True)):
            if gradient is None:
                continue
            accumulate = self.contributions[index] > 0
            if isinstance(total, torch.Tensor):
                assert isinstance(gradient, CheckedFrame)  # batched tensors are summed on the host
                gradient.decode(total, accumulate=accumulate)
            elif isinstance(gradient, BatchedTensor):
                gradient.unpack(total, accumulate=accumulate)
            else:
                gradient.decode_flat(total, accumulate=accumulate)
            self.contributions[index] += 1

    def average(self, over: int) -> None:
        """Divides every sum by a number of senders, as a multiplication by its reciprocal in the sum's dtype."""
        if over == 1:
            return
        for total in self.sums:
            factor = (np.float64 if total.itemsize == 8 else np.float32)(1 / over)
            if isinstance(total, torch.Tensor):
                total *= float(factor)
            else:
                total *= factor
