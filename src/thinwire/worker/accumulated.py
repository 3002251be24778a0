"""Gradients of one table that wait for a later push: their sum, in the host's memory, where criteria compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from thinwire.codecs.tensors import FloatArray
from thinwire.errors import NonFiniteError


@dataclass(frozen=True, slots=True, eq=False)
class Accumulated:
    """The gradients of one table that wait.

    Args:
        sum: of the gradients, float32 in the table's shape, never written to; None where no gradient waits.
        iterations: how many gradients are in it.
        squares: the sum of all their squares.
    """

    sum: FloatArray | None = None
    iterations: int = 0
    squares: float = 0.0

    def plus(self, gradient: torch.Tensor, name: str) -> Accumulated:
        """Returns this and one more gradient, which is copied. Raises NonFiniteError, with the table's name."""
        values: FloatArray = gradient.detach().to("cpu", torch.float32).contiguous().numpy()
        flat = values.reshape(-1)
        if not np.isfinite(flat).all():
            raise NonFiniteError(f"{name}: holds NaN or Inf; nothing was accumulated, no state was changed")
        return Accumulated(values.copy(), 1, float(np.vdot(flat, flat))).joined(self)

    def joined(self, other: Accumulated) -> Accumulated:
        """Returns the gradients of both."""
        if self.sum is None or other.sum is None:
            return other if self.sum is None else self
        total: FloatArray = np.asarray(self.sum + other.sum, np.float32)
        return Accumulated(total, self.iterations + other.iterations, self.squares + other.squares)

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy; an empty one where no gradient waits."""
        if self.sum is None:
            return {}
        return {
            "accumulated": torch.from_numpy(self.sum.copy()),
            "accumulated_iterations": self.iterations,
            "accumulated_squares": self.squares,
        }

    @classmethod
    def of_state(cls, total: torch.Tensor | None, iterations: int, squares: float) -> Self:
        """Restores it from what `state_dict` returned; None where no gradient waited."""
        return cls() if total is None else cls(total.to("cpu", torch.float32).numpy().copy(), iterations, squares)
