"""Gradients of one table, at one step, from all workers.

Frames are decoded and added in the order of the ranks, whatever the order of arrival: floating-point addition
is not associative, and two runs with one seed must give the same weights. A frame whose turn has come is
decoded at once, so on a slow link the work is spread over the arrivals.
"""

from __future__ import annotations

import numpy as np

from thinwire.codecs import decode
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import FrameError

NO_GRADIENT = b""
"""The frame of a parameter that took no part in this step."""


class Aggregation:
    """The running sum of one table's gradients, and the frames that wait for their turn."""

    def __init__(self, shape: tuple[int, ...], workers: int) -> None:
        self._workers = workers
        self._sum = np.zeros(shape, np.float32)
        self._waiting: dict[int, bytes] = {}
        self._next = 0
        self._given = 0

    def has(self, rank: int) -> bool:
        """Whether this worker's gradient is in."""
        return rank < self._next or rank in self._waiting

    @property
    def started(self) -> bool:
        """Whether any worker's gradient is in."""
        return self._next > 0 or bool(self._waiting)

    def add(self, rank: int, frame: bytes) -> None:
        """Takes a frame that was checked against the table.

        Raises:
            FrameError: this frame, or one that waited for its turn, holds a damaged payload: the text says whose.
                It is dropped, and the sum is what it was.
        """
        self._waiting[rank] = frame
        while self._next in self._waiting:
            frame = self._waiting.pop(self._next)
            if frame != NO_GRADIENT:
                self._decode(frame)
                self._given += 1
            self._next += 1

    def _decode(self, frame: bytes) -> None:
        try:
            # A sum that overflows is Inf, and what follows from it is noticed when the update is encoded.
            with np.errstate(over="ignore", invalid="ignore"):
                decode(frame, out=self._sum, accumulate=self._given > 0)
        except FrameError as error:
            raise FrameError(f"the gradient of worker {self._next}: {error}") from error

    @property
    def complete(self) -> bool:
        """Whether every worker's gradient is in."""
        return self._next == self._workers

    def take(self, reduce: str) -> FloatArray | None:
        """Returns the mean (or sum) over the gradients that came, and starts over; None where none came.

        The array is reused by the next step.
        """
        given, self._given, self._next = self._given, 0, 0
        if given == 0:
            return None
        if reduce == "mean" and given > 1:
            self._sum *= np.float32(1 / given)
        return self._sum
