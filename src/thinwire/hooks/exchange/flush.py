"""When a controller stops compressing, the next uncompressed step takes the residuals.

The averages of all uncompressed steps are looked at: NaN or Inf in them makes all ranks skip the step, or raise.
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
    """The residuals of one rank that the next uncompressed step takes.

    Args:
        core: this rank's part in the exchange.
        driver: of the same exchange.

    Attributes:
        waiting: whether something waits for an uncompressed step.
        under_way: whether the step under way has taken some of it.
        undone: whether NaN or Inf came of the step under way: nobody takes it, and what it took, if anything, waits
            again.
    """

    def __init__(self, core: Collective, driver: CollectiveDriver) -> None:
        self._core, self._driver = core, driver
        self.waiting = self.under_way = self.undone = False
        # By name of its context, as a step does not always reduce all gradients; None where it may be all of them.
        self._left: set[str] | None = None
        self._left_before: set[str] = set()
        self._finite: list[torch.Tensor] = []  # of averages on a GPU

    def expect_all(self) -> None:
        """Says that something may wait in every residual."""
        self.waiting, self._left = True, None

    def add(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Adds residuals to a gradient, before it is all-reduced as an average over the ranks."""
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
        """Takes an average of the step under way.

        Called in gloo's threads and in the backward pass's, perhaps at once: it only ever sets `undone`.
        """
        if averaged.is_cuda:
            self._finite.append(averaged.isfinite().all())  # for `check_finite`: to ask now would wait for every bucket
        # A sum takes a twentieth of the time. It may overflow, but it is finite only where all values are.
        elif not (math.isfinite(averaged.sum()) or averaged.isfinite().all()):
            self.undone = True

    def check_finite(self) -> bool:
        """Returns whether the step under way is undone, once all its averages are there.

        Raises:
            NonFiniteError: it is, and steps are not skipped.
        """
        finite, self._finite = self._finite, []
        found = defaultdict[torch.device, list[torch.Tensor]](list)
        for each in finite:
            found[each.device].append(each)
        if not all(bool(torch.stack(alike).all()) for alike in found.values()):  # one question to each GPU
            self.undone = True
        if self.undone and not self._core.skip:
            raise NonFiniteError(
                "an average of the ranks' gradients, which this step exchanged uncompressed, holds NaN or Inf: some "
                "rank's gradient did"
            )
        return self.undone

    def skip(self) -> None:
        """Skips the step under way, which has all its averages, as ranks do that see others."""
        self.undone = self.under_way
        if not self.undone:  # nothing is to be given back, and a rank that holds padding alone settles nothing
            self._core.skip_step(exchanged=False)

    def settle(self) -> None:
        """Ends a step that may have taken residuals; between two steps. Raises NonFiniteError, as `check_finite`."""
        self.check_finite()
        # After a reduce-scatter every rank sees another part, and the step may have been broken off.
        if self.under_way and self._core.skip and not self._core.pulls:
            self.undone = b"\1" in gather(self._driver.peers, bytes([self.undone]))
        self._core.steps_skipped += self.undone
        if not self.under_way:
            self.undone = False
            return
        if self.undone:  # all ranks skip the step: what was flushed must not go with it
            self._core.residuals.restore()
            self._left = self._left_before
        self.waiting = bool(self._left)
        self.under_way = self.undone = False
