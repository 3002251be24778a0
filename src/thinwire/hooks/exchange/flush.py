"""What a controller that stops compressing does with residuals: they go into the next uncompressed step."""

from __future__ import annotations

import torch

from thinwire.collective.core import Bucket, Collective
from thinwire.runtime.collective import CollectiveDriver
from thinwire.runtime.peers import gather


class Flush:
    """What waits in the residuals of one rank, and the uncompressed step that takes it.

    Args:
        core: this rank's part in the exchange.
        driver: of the same exchange.

    Attributes:
        waiting: whether something waits for an uncompressed step.
        under_way: whether the step under way has taken some of it.
        undone: whether NaN or Inf came of that step: what it took, if anything, waits again.
    """

    def __init__(self, core: Collective, driver: CollectiveDriver) -> None:
        self._core, self._driver = core, driver
        self.waiting = self.under_way = self.undone = False
        # By name of its context, as a step does not always reduce all gradients; None where it may be all of them.
        self._left: set[str] | None = None
        self._left_before: set[str] = set()

    def expect_all(self) -> None:
        """Says that something may wait in every residual."""
        self.waiting, self._left = True, None

    def add(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Adds to a gradient what waits, before it is all-reduced as an average over the ranks."""
        if not self.waiting:
            return
        if self._left is None:
            self._left = self._core.residuals.names()
        if not self._core.awaits(bucket, self._left):
            return
        if not self.under_way:
            self._left_before = set(self._left)
            if self._core.skip:
                self._core.residuals.snapshot()
        self.under_way = True
        self._driver.flush(bucket, buffer, self._left)

    def reduced(self, averaged: torch.Tensor) -> None:
        """Takes an average of the step under way: of every gradient, as nobody knows yet whether a later one waits.

        Called in gloo's threads and in the backward pass's, perhaps at once: it only ever sets `undone`.
        """
        if self.waiting and self._core.skip and not bool(averaged.isfinite().all()):
            self.undone = True

    def settle(self) -> None:
        """Ends a step that may have taken what waited; between two steps."""
        if not self.under_way:
            self.undone = False
            return
        if self._core.skip and not self._core.pulls:  # after a reduce-scatter every rank sees another part
            self.undone = b"\1" in gather(self._driver.peers, bytes([self.undone]))
        if self.undone:  # all ranks skip the step: what was flushed must not go with it
            self._core.residuals.restore()
            self._left = self._left_before
        self.waiting = bool(self._left)
        self.under_way = self.undone = False
