"""Means over those who sent a value: of frames that hold some of a tensor's values, the mean of what came for each.

Where k of every block travel, a plain mean divides a value that one of N workers sent by N. SparseLoCo and DeMo divide
it by the number of workers that sent it. SparseLoCo also scales every worker's message down to the median norm, so that
no single one outweighs the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.codecs.decoding import CheckedFrame, Gradient, GradientSums
from thinwire.codecs.scheme import Sent
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import FrameError


class SenderMeans(GradientSums):
    """`GradientSums` whose `average` divides every value by the number of senders that sent it.

    What came is kept as positions and values until `average` adds it up, in the order of the `add`s: the median norm is
    known only then. A sender of zeros counts for the positions that it sent.

    Args:
        sums: flat float32 or float64, one for each tensor; `average` overwrites them.
        clip: scale each message down to the median of their norms (the lower of two middle ones; messages of zeros do
            not count), for each tensor by itself.

    Example:
        >>> import torch, thinwire as tw
        >>> top = tw.codec("topk", k=2)
        >>> means = SenderMeans([np.zeros(4, np.float32)])
        >>> for sent in ([8, 2, 0, 0], [6, 0, 0, 1]):
        ...     means.add([tw.codecs.open_frame(top.encode(torch.tensor(sent, dtype=torch.float32)))])
        >>> means.average(2)
        >>> means.sums[0].tolist()
        [7.0, 2.0, 0.0, 1.0]
    """

    __slots__ = ("_clip", "_held")

    def __init__(self, sums: Sequence[FloatArray], *, clip: bool = False) -> None:
        super().__init__(sums)
        self._clip = clip
        self._held: list[list[Sent]] = [[] for _ in sums]

    def add(self, gradients: Sequence[Gradient | None]) -> None:
        """Takes one sender's frames, one for each tensor; None where it has none.

        Raises:
            FrameError: a payload is damaged, or its values are of another transform than the first sender's.
        """
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            assert isinstance(gradient, CheckedFrame)  # tensors in batches travel whole
            held, sent = self._held[index], gradient.sent()
            if self.contributions[index] == 0:
                held.clear()
            elif sent.transform != held[0].transform:
                raise FrameError(f"values of {sent.transform} came, and of {held[0].transform} before")
            held.append(sent)
            self.contributions[index] += 1

    def average(self, over: int) -> None:
        """Fills every sum with the mean over those who sent a value, 0 where nobody did; `over` does not matter."""
        del over
        for total, held in zip(self.sums, self._held, strict=True):
            assert isinstance(total, np.ndarray)
            total.fill(0)
            senders = np.zeros(total.size, np.uint16)
            for sent, factor in zip(held, _factors(held) if self._clip else [1.0] * len(held), strict=True):
                values = sent.values.astype(total.dtype, copy=False)
                total[sent.positions] += values if factor == 1 else values * total.dtype.type(factor)
                senders[sent.positions] += 1  # positions of one frame differ from each other
            np.divide(total, senders, out=total, where=senders > 1)
            if held and (transform := held[0].transform) is not None:
                transform.invert(total)
            held.clear()


def _factors(held: Sequence[Sent]) -> list[float]:
    """What each message is multiplied by so that its norm is at most the median one."""
    # Sums of squares in float64 do not overflow; NumPy adds them up in a fixed order.
    norms = [float(np.sqrt(np.square(sent.values, dtype=np.float64).sum())) for sent in held]
    counted = sorted(norm for norm in norms if norm > 0)
    median = counted[(len(counted) - 1) // 2] if counted else 0.0
    return [median / norm if norm > median else 1.0 for norm in norms]
