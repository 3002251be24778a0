"""Gradients of one table that wait for a later push, added up in the host's memory, where criteria compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from thinwire.codecs.tensors import FloatArray
from thinwire.errors import NonFiniteError
from thinwire.schema import TableSpec


class Accumulated:
    """What waits of one table.

    Args:
        spec: name and shape.

    Attributes:
        sum: of the gradients, float32 in the table's shape; None where nothing waits.
        iterations: how many gradients are in it.
        squares: the sum of all their squares.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self.clear()

    def clear(self) -> None:
        """Forgets what waits."""
        self.sum: FloatArray | None = None
        self.iterations = 0
        self.squares = 0.0

    def copy(self) -> Accumulated | None:
        """Returns what waits now; None where nothing does."""
        if self.sum is None:
            return None
        copy = Accumulated(self._spec)
        copy.sum, copy.iterations, copy.squares = self.sum, self.iterations, self.squares  # sums are never added into
        return copy

    def add_back(self, earlier: Accumulated) -> None:
        """Adds what waited before a push that had no effect."""
        assert earlier.sum is not None
        self.sum = earlier.sum if self.sum is None else earlier.sum + self.sum
        self.iterations += earlier.iterations
        self.squares += earlier.squares

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a gradient. Raises NonFiniteError before anything is changed."""
        flat = _on_host(gradient)
        self.sum = self._sum_with(flat)
        self.iterations += 1
        self.squares += float(np.vdot(flat, flat))

    def plus(self, gradient: torch.Tensor) -> FloatArray:
        """Returns the sum with one more gradient, and keeps nothing. Raises NonFiniteError."""
        return self._sum_with(_on_host(gradient))

    def _sum_with(self, flat: FloatArray) -> FloatArray:
        if not np.isfinite(flat).all():
            raise NonFiniteError(f"{self._spec.name}: holds NaN or Inf; nothing was accumulated, no state was changed")
        total: FloatArray = np.asarray(
            flat.reshape(self._spec.shape) + (0 if self.sum is None else self.sum), np.float32
        )
        return total

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of what waits; nothing where nothing does."""
        if self.sum is None:
            return {}
        return {
            "accumulated": torch.from_numpy(self.sum.copy()),
            "accumulated_iterations": self.iterations,
            "accumulated_squares": self.squares,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, which may stand among other things."""
        self.clear()
        if "accumulated" in state:
            self.sum = state["accumulated"].cpu().numpy().copy()
            self.iterations = int(state["accumulated_iterations"])
            self.squares = float(state["accumulated_squares"])


def _on_host(gradient: torch.Tensor) -> FloatArray:
    values: FloatArray = gradient.detach().to(device="cpu", dtype=torch.float32).contiguous().view(-1).numpy()
    return values
