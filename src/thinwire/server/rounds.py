"""Small things that all workers say once a step, gathered until everybody has spoken."""

from __future__ import annotations

import math

from thinwire.errors import ProtocolError

MAX_OPEN = 64
"""Rounds that may be open at a time; more means that a peer does not keep to the conversation."""


class Maxima:
    """The largest over all workers of each of a list of numbers, per step."""

    def __init__(self) -> None:
        self._open: dict[int, dict[int, tuple[float, ...]]] = {}

    def add(self, rank: int, step: int, values: tuple[float, ...], workers: int) -> tuple[float, ...] | None:
        """Takes one worker's numbers; returns the maxima once all are in.

        Raises:
            ProtocolError: a number that is negative, NaN or Inf; a worker that speaks twice; too many open steps.
        """
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ProtocolError("a scalar is negative, NaN or Inf")
        said = self._open.setdefault(step, {})
        if rank in said or len(self._open) > MAX_OPEN:
            raise ProtocolError(f"scalars for step {step} came twice, or for too many steps")
        said[rank] = values
        if len(said) < workers:
            return None
        del self._open[step]
        return tuple(map(max, *said.values())) if len(said) > 1 else values


class Digests:
    """Digests of replicas, compared step by step. The first one of a step is what the others must equal."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, str]] = {}

    def add(self, rank: int, step: int, digest: str) -> None:
        """Takes one worker's digest.

        Raises:
            ProtocolError: it differs from another worker's.
        """
        first, expected = self._first.setdefault(step, (rank, digest))
        if digest != expected:
            raise ProtocolError(
                f"its model differs from worker {first}'s before step {step}: replicas have drifted apart"
            )
        if len(self._first) > MAX_OPEN:
            del self._first[min(self._first)]
