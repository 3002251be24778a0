"""Criteria of adaptive communication: is the gradient that accumulated for a tensor worth sending now?

A criterion computes from what its caller passes, the time included, and keeps no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

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


class Criterion(Protocol):
    """Answers whether to send."""

    def send(self, pending: Pending) -> bool:
        """True sends the tensor now."""
        ...


@dataclass(frozen=True)
class Norm:
    """‖pending‖ / ‖weights‖ ≥ threshold: small updates wait until they add up (Gaia's significance, per tensor)."""

    threshold: float

    def send(self, pending: Pending) -> bool:
        weights = float(np.linalg.norm(pending.weights))
        return float(np.linalg.norm(pending.gradient)) >= self.threshold * weights


@dataclass(frozen=True)
class Variance:
    """‖Σg‖² ≥ threshold · Σ‖g‖²: sends once the gradients agree rather than cancel (Tsuzuku et al., per tensor).

    For n gradients that cancel, the left side is about Σ‖g‖²; for equal ones n times that.
    """

    threshold: float

    def send(self, pending: Pending) -> bool:
        return float(np.vdot(pending.gradient, pending.gradient)) >= self.threshold * pending.squares


@dataclass(frozen=True)
class Period:
    """Every `threshold` iterations."""

    threshold: float

    def send(self, pending: Pending) -> bool:
        return pending.iterations >= self.threshold


@dataclass(frozen=True)
class Time:
    """When `threshold` seconds have gone by since the tensor was sent."""

    threshold: float

    def send(self, pending: Pending) -> bool:
        return pending.seconds >= self.threshold


CRITERIA: dict[str, type[Norm] | type[Variance] | type[Period] | type[Time]] = {
    "norm": Norm,
    "variance": Variance,
    "period": Period,
    "time": Time,
}


def criterion(name: str, threshold: float) -> Criterion:
    """Returns a criterion by name. Raises ConfigError where there is none, or the threshold is below 0."""
    if not isinstance(name, str) or name not in CRITERIA:
        raise ConfigError(f"unknown criterion {name!r}; there are {', '.join(CRITERIA)}")
    if not isinstance(threshold, int | float) or not 0 <= threshold < float("inf"):
        raise ConfigError(f"criterion {name}: threshold={threshold!r}; it must be a finite number of at least 0")
    return CRITERIA[name](float(threshold))
