"""Copies of compression contexts, by which an exchange is undone."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch

from thinwire.codecs import Context
from thinwire.policies.assignment import Partition

Lag = npt.NDArray[np.float64]
"""What `LagBound.changing` returns."""


class Snapshot:
    """Copies of what an exchange changes in contexts: residuals, counts of encodes, and bounds of the lag.

    Args:
        contexts: by tensor and slice.
    """

    def __init__(self, contexts: Mapping[tuple[str, Partition], Context]) -> None:
        self._contexts = contexts
        self._taken: dict[tuple[str, Partition], tuple[int, torch.Tensor | None, Lag | None]] = {}

    def take(self, kept: Collection[str] = ()) -> None:
        """Copies every context's state, in the place of earlier copies.

        Args:
            kept: tensors whose earlier copies stay.
        """
        for key, context in self._contexts.items():
            if key[0] in kept and key in self._taken:
                continue
            residual = context.residual
            copy = self._taken.get(key, (0, None, None))[1]
            if residual is not None:
                copy = residual.clone() if copy is None else copy.copy_(residual)
            bound = context.lag_bound
            self._taken[key] = (context.step, copy, None if bound is None else bound.changing())

    def restore(self, names: Collection[str] | None = None) -> None:
        """Returns contexts to their copies, bit for bit: those of all tensors, or of these."""
        for key, (step, copy, lag) in self._taken.items():
            if names is not None and key[0] not in names:
                continue
            context = self._contexts[key]
            context.step = step
            if context.lag_bound is not None and lag is not None:
                context.lag_bound.restore(lag)
            if context.residual is not None and copy is not None:
                context.residual.copy_(copy)

    def scale(self, factor: float) -> None:
        """Multiplies the copies, for gradients whose loss scale has changed by this factor."""
        for _, copy, _ in self._taken.values():
            if copy is not None:
                copy.mul_(factor)
