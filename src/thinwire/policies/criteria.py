"""Criteria of adaptive communication: is the gradient that accumulated for a tensor worth sending now?

A criterion computes from what its caller passes, the time included, and keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pending:
    """The accumulated gradient of one tensor, when its criterion is asked.

    Args:
        gradient: the sum of all gradients that were not sent yet.
        weights: the worker's copy of the tensor.
        iterations: how many iterations' gradients are in the sum.
        squares: the sum of the squares of those gradients.
        seconds: since the tensor was sent last, in seconds.
    """

    gradient: NDArray[Any]
    weights: NDArray[Any]
    iterations: int
    squares: float
    seconds: float


def _norm(pending: Pending, threshold: float) -> bool:
    """‖pending‖ / ‖weights‖ ≥ threshold: small updates wait until they add up (Gaia's significance, per tensor)."""
    return float(np.linalg.norm(pending.gradient)) >= threshold * float(np.linalg.norm(pending.weights))


def _variance(pending: Pending, threshold: float) -> bool:
    """‖Σg‖² ≥ threshold · Σ‖g‖²: sends once the gradients agree rather than cancel (Tsuzuku et al., per tensor).

    For n gradients that cancel, the left side is about Σ‖g‖²; for equal ones n times that.
    """
    return float(np.vdot(pending.gradient, pending.gradient)) >= threshold * pending.squares


CRITERIA: dict[str, Callable[[Pending, float], bool]] = {
    "norm": _norm,
    "variance": _variance,
    "period": lambda pending, threshold: pending.iterations >= threshold,
    "time": lambda pending, threshold: pending.seconds >= threshold,
}
"""By name: whether to send. A period's threshold is in iterations, a time's in seconds since the last time."""


@dataclass(frozen=True)
class Criterion:
    """A criterion by name, with its threshold. Raises ConfigError where there is none, or the threshold is below 0."""

    name: str
    threshold: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in CRITERIA:
            raise ConfigError(f"unknown criterion {self.name!r}; there are {', '.join(CRITERIA)}")
        if not isinstance(self.threshold, int | float) or not 0 <= self.threshold < float("inf"):
            raise ConfigError(
                f"criterion {self.name}: threshold={self.threshold!r}; it must be a finite number of at least 0"
            )

    def send(self, pending: Pending) -> bool:
        """Whether to send the tensor now."""
        return CRITERIA[self.name](pending, self.threshold)
