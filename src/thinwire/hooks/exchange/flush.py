"""Adds residuals to the next uncompressed step, after a controller has stopped compressing.

The averages of all uncompressed steps are checked: NaN or Inf in them makes all ranks skip the step, or raise.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from thinwire.collective.core import Bucket, Collective
from thinwire.errors import NonFiniteError
from thinwire.runtime.collective import CollectiveDriver
from thinwire.runtime.peers import gather


class Flush:
    """The residuals of one rank that wait for the next uncompressed step.

    Args:
        core: this rank's part in the exchange.
        driver: of the same exchange.

    Attributes:
        waiting: whether residuals wait for an uncompressed step.
        under_way: whether the step under way contains some of them.
        undone: whether the averages of the step under way contain NaN or Inf: all ranks skip it, and its residuals wait
            again.
    """

    def __init__(self, core: Collective, driver: CollectiveDriver) -> None:
        self._core, self._driver = core, driver
        self.waiting = self.under_way = self.undone = False
        # The names of waiting contexts, because a step may reduce only some gradients; None: possibly all.
        self._left: set[str] | None = None
        self._left_before: set[str] = set()
        self._finite: list[torch.Tensor] = []  # of averages on a GPU

    def expect_all(self) -> None:
        """Marks every residual as waiting."""
        self.waiting, self._left = True, None

    def add(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Adds residuals to a gradient, before the ranks average it."""
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
        """Checks an average of the step under way.

        Gloo's threads and the backward pass may call it at the same time: it only sets `undone`.
        """
        if averaged.is_cuda:
            self._finite.append(averaged.isfinite().all())  # read in `check_finite`: now it would wait for every bucket
        # A sum takes a twentieth of the time. It may overflow, but it is finite only if all values are.
        elif not (math.isfinite(averaged.sum()) or averaged.isfinite().all()):
            self.undone = True

    def check_finite(self) -> bool:
        """Returns whether the step under way is undone, once all its averages are complete.

        Raises:
            NonFiniteError: the step is undone, and steps are not skipped.
        """
        finite, self._finite = self._finite, []
        found = defaultdict[torch.device, list[torch.Tensor]](list)
        for each in finite:
            found[each.device].append(each)
        if not all(bool(torch.stack(flags).all()) for flags in found.values()):  # one read from each GPU
            self.undone = True
        if self.undone and not self._core.skip:
            raise NonFiniteError(
                "an average of the ranks' gradients, which this step exchanged uncompressed, holds NaN or Inf: some "
                "rank's gradient did"
            )
        return self.undone

    def skip(self) -> None:
        """Skips the step under way, with all its averages, because a rank with other averages does."""
        self.undone = self.under_way
        if not self.undone:  # no residuals to restore, and on a rank with only padding no exchange
            self._core.skip_step(exchanged=False)

    def settle(self) -> None:
        """Ends a step that may contain residuals; between two steps. Raises NonFiniteError as `check_finite` does."""
        self.check_finite()
        # After a reduce-scatter every rank sees another part, and the step may have been interrupted.
        if self.under_way and self._core.skip and not self._core.pulls:
            self.undone = b"\1" in gather(self._driver.peers, bytes([self.undone]))
        self._core.steps_skipped += self.undone
        if not self.under_way:
            self.undone = False
            return
        if self.undone:  # all ranks skip the step: its residuals must not be lost
            self._core.residuals.restore()
            self._left = self._left_before
        self.waiting = bool(self._left)
        self.under_way = self.undone = False
