"""Copies of compression contexts, to undo an exchange."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch

from thinwire.codecs import Context
from thinwire.policies.assignment import Partition

Lag = npt.NDArray[np.float64]
"""The result of `LagBound.changing`."""


class Snapshot:
    """Copies of the context states that an exchange changes: residuals, counts of encodes, and bounds on the lag.

    Args:
        contexts: by tensor and slice.
    """

    def __init__(self, contexts: Mapping[tuple[str, Partition], Context]) -> None:
        self._contexts = contexts
        self._taken: dict[tuple[str, Partition], tuple[int, torch.Tensor | None, Lag | None]] = {}

    def take(self, kept: Collection[str] = ()) -> None:
        """Copies every context's state and replaces earlier copies.

        Args:
            kept: tensors whose earlier copies remain.
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
        """Restores contexts from their copies, bit for bit: of all tensors, or of `names`."""
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
        """Multiplies the copies, for gradients whose loss scale changed by this factor."""
        for _, copy, _ in self._taken.values():
            if copy is not None:
                copy.mul_(factor)
