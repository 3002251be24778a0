"""The gradients of one table that wait for a later push, summed in the host's memory, where criteria compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from thinwire.codecs.tensors import FloatArray
from thinwire.errors import NonFiniteError
from thinwire.policies.criteria import Pending


class Accumulator:
    """A sum of gradients, empty at first.

    Args:
        name: of the table, for errors.
        shape: of the table.
    """

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self._name, self._shape = name, shape
        self.clear()

    def clear(self) -> None:
        """Empties it, after its sum was pushed."""
        self.sum: FloatArray | None = None
        self._iterations = 0
        self._squares = 0.0

    def plus(self, gradient: torch.Tensor) -> FloatArray:
        """Returns the sum with one more gradient, and keeps nothing.

        Raises:
            NonFiniteError: NaN or Inf.
        """
        flat = _flat(gradient)
        if not np.isfinite(flat).all():
            raise NonFiniteError(f"{self._name}: holds NaN or Inf; nothing was accumulated and no state was changed")
        total: FloatArray = flat.reshape(self._shape) + (0 if self.sum is None else self.sum)
        return total.astype(np.float32, copy=False)

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a gradient. Raises NonFiniteError before anything is changed."""
        self.sum = self.plus(gradient)
        flat = _flat(gradient)
        self._iterations += 1
        self._squares += float(np.vdot(flat, flat))

    def pending(self, weights: FloatArray, seconds: float) -> Pending:
        """Returns what a criterion is asked about.

        Args:
            weights: the worker's copy of the table.
            seconds: since the table was pushed last.
        """
        assert self.sum is not None
        return Pending(self.sum, weights, self._iterations, self._squares, seconds)

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the sum and of what criteria know of it; nothing while it is empty."""
        if self.sum is None:
            return {}
        return {
            "accumulated": torch.from_numpy(self.sum.copy()),
            "accumulated_iterations": self._iterations,
            "accumulated_squares": self._squares,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.clear()
        if "accumulated" in state:
            self.sum = state["accumulated"].numpy().copy()
            self._iterations = int(state["accumulated_iterations"])
            self._squares = float(state["accumulated_squares"])


def _flat(gradient: torch.Tensor) -> FloatArray:
    values: FloatArray = gradient.detach().to(device="cpu", dtype=torch.float32).contiguous().view(-1).numpy()
    return values
