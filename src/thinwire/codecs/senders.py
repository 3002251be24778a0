"""Means over the workers that sent a value, for frames that hold some of a tensor's values.

With k values sent of every block, a plain mean divides a value that one of N workers sent by N. SparseLoCo and DeMo
divide it by the number of workers that sent it. SparseLoCo also scales every worker's message down to the median norm,
so that no message outweighs the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from thinwire.codecs.decoding import CheckedFrame, Values
from thinwire.codecs.scheme import Sent
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import FrameError


class SenderMeans:
    """The mean of every value over the senders that sent it.

    `add` keeps positions and values until `fill` adds them in the order of the calls, because the median norm is
    known only then. A sender of zeros counts for the positions that it sent.

    Args:
        out: flat, float32 or float64, in the host's memory or on a GPU; `fill` overwrites it.
        clip: scale each message down to the median of their norms (the lower of two middle ones; messages of zeros do
            not count).

    Example:
        >>> import torch, thinwire as tw
        >>> top, out = tw.codec("topk", k=2), np.zeros(4, np.float32)
        >>> means = SenderMeans(out)
        >>> for sent in ([8, 2, 0, 0], [6, 0, 0, 1]):
        ...     means.add(tw.codecs.open_frame(top.encode(torch.tensor(sent, dtype=torch.float32))))
        >>> means.fill()
        >>> out.tolist()
        [7.0, 2.0, 0.0, 1.0]
    """

    def __init__(self, out: Values, *, clip: bool = False) -> None:
        self._out, self._clip = out, clip
        self._held: list[Sent] = []

    def add(self, frame: CheckedFrame, *, first: bool = False) -> None:
        """Takes one sender's frame.

        Args:
            frame: of the values.
            first: drops earlier frames.

        Raises:
            FrameError: the payload is damaged, or its values are of another transform than the first sender's.
        """
        sent = frame.sent()
        if first:
            self._held.clear()
        if self._held and sent.transform != self._held[0].transform:
            raise FrameError(f"values of {sent.transform} came after values of {self._held[0].transform}")
        self._held.append(sent)

    def fill(self) -> None:
        """Fills the output with the means, 0 where no sender sent a value, and drops all frames."""
        held, self._held = self._held, []
        out: FloatArray = self._out if isinstance(self._out, np.ndarray) else self._out.cpu().numpy()
        senders = np.zeros(out.size, np.uint16)
        out.fill(0)
        for sent, factor in zip(held, _factors(held) if self._clip else [1.0] * len(held), strict=True):
            values = sent.values.astype(out.dtype, copy=False)
            out[sent.positions] += values if factor == 1 else values * out.dtype.type(factor)
            senders[sent.positions] += 1  # positions of one frame differ from each other
        np.divide(out, senders, out=out, where=senders > 1)
        if held and (transform := held[0].transform) is not None:
            transform.invert(out)
        if not isinstance(self._out, np.ndarray):
            self._out.copy_(torch.from_numpy(out))


def _factors(held: Sequence[Sent]) -> list[float]:
    """Returns the factor of each message that makes its norm at most the median one."""
    # Sums of squares in float64 do not overflow; NumPy adds them in a fixed order.
    norms = [float(np.sqrt(np.square(sent.values, dtype=np.float64).sum())) for sent in held]
    counted = sorted(norm for norm in norms if norm > 0)
    median = counted[(len(counted) - 1) // 2] if counted else 0.0
    return [median / norm if norm > median else 1.0 for norm in norms]
