"""Gradients of one table, from all workers, clock by clock.

Frames are decoded and added in the order of the ranks, whatever the order of arrival: floating-point addition
is not associative, and two runs with one seed must give the same weights. Where everybody's gradient is needed, a
frame whose turn has come is decoded at once, so that on a slow link the work is spread over the arrivals; where
some may be missing, nobody's turn is known before the quorum is there. Gradients of later clocks wait as frames.
"""

from __future__ import annotations

import numpy as np

from thinwire.codecs.sums import Gradient, GradientSums
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import FrameError

NO_GRADIENT = b""
"""The frame of a parameter that took no part in this step."""

NOBODY = (-1,)
"""The ranks of an update that a worker's NaN or Inf made everybody skip."""


class Aggregation:
    """The gradients of the current clock and of those ahead of it.

    Args:
        shape: of the table.
        workers: how many workers there are.
        quorum: how many gradients complete a clock; by default all.
    """

    def __init__(self, shape: tuple[int, ...], workers: int, quorum: int | None = None) -> None:
        self.clock = 0
        self._quorum = workers if quorum is None else quorum
        self._eager = self._quorum == workers
        self._sum = np.zeros(shape, np.float32)
        self._total = GradientSums([self._sum.reshape(-1)])
        self._arrived: dict[int, dict[int, Gradient | None]] = {0: {}}
        self._refused: set[int] = set()
        self._next = 0

    @property
    def size(self) -> int:
        """Number of values."""
        return self._sum.size

    def has(self, rank: int, clock: int | None = None) -> bool:
        """Whether this worker's gradient of a clock (by default the current one) is in."""
        return rank in self._arrived.get(self.clock if clock is None else clock, ())

    @property
    def started(self) -> bool:
        """Whether any worker's gradient of the current clock, or of a later one, is in."""
        return any(self._arrived.values())

    def add(self, rank: int, frame: Gradient | None, clock: int | None = None) -> None:
        """Takes a worker's gradient, already checked against the table; None says that it has none.

        Raises:
            FrameError: this frame, or one that waited for its turn, holds a damaged payload: the text says whose.
                It is dropped, and the sum is what it was.
        """
        self._arrived.setdefault(self.clock if clock is None else clock, {})[rank] = frame
        if self._eager:
            self._decode_in_turn()

    def refuse(self, rank: int, clock: int | None = None) -> None:
        """A worker's gradient is not finite: it is in, and nobody's counts at this clock."""
        self._refused.add(self.clock if clock is None else clock)
        self.add(rank, None, clock)

    @property
    def complete(self) -> bool:
        """Whether enough gradients of the current clock are in."""
        return len(self._arrived[self.clock]) >= self._quorum

    def take(self, reduce: str) -> tuple[FloatArray | None, tuple[int, ...]]:
        """Ends the current clock.

        Args:
            reduce: `mean` over the gradients that came, or their `sum`.

        Returns:
            The aggregate (None where nobody had a gradient; the array is used again by the next clock), and the
            ranks that took part: `NOBODY` where one of them refused.
        """
        arrived = self._arrived.pop(self.clock)
        refused = self.clock in self._refused
        self._refused.discard(self.clock)
        if not self._eager and not refused:
            for rank in sorted(arrived):
                self._add_to_sum(rank, arrived[rank])
        given = self._total.contributions[0]
        self._start_anew()
        self.clock += 1
        self._arrived.setdefault(self.clock, {})
        if refused:
            return None, NOBODY
        if given and reduce == "mean":
            self._total.average(given)
        return (self._sum if given else None), tuple(sorted(arrived))

    def begin_at(self, clock: int) -> None:
        """Goes on with this clock; what had come is forgotten."""
        self.clock = clock
        self._start_anew()
        self._arrived = {clock: {}}
        self._refused.clear()

    def resume(self) -> None:
        """Decodes what is in for the current clock; called once the last aggregate is no longer needed."""
        if self._eager:
            self._decode_in_turn()

    def _decode_in_turn(self) -> None:
        arrived = self._arrived[self.clock]
        while self._next in arrived:
            rank = self._next
            try:
                self._add_to_sum(rank, arrived[rank])
            except FrameError:
                del arrived[rank]
                raise
            arrived[rank] = None  # it is in the sum; its bytes may go
            self._next += 1

    def _start_anew(self) -> None:
        self._total.contributions[0] = self._next = 0

    def _add_to_sum(self, rank: int, frame: Gradient | None) -> None:
        try:
            self._total.add([frame])
        except FrameError as error:
            raise FrameError(f"the gradient of worker {rank}: {error}") from error
