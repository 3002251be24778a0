"""Messages of all workers once a step: shared scales, and digests of their replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from thinwire.errors import ProtocolError

LEFT_BEFORE = (
    "worker {rank} has left before {moment}, with which the others go on; all workers must take the same number of "
    "steps"
)
_MIXED = (
    "Its processor computes with {ours} and the other's with {theirs}, which round differently, and in this design "
    "every worker runs the optimizer: take machines of one kind, or a design whose servers run it, such as 3lc"
)
_DRIFTED = "Code that writes to parameters on some workers only does that, and faulty memory"
MAX_OPEN = 64
"""Steps of which some workers have spoken and others have not; more means that a peer breaks the conversation."""


class Maxima:
    """The largest over all workers of each of a list of numbers, per step."""

    def __init__(self) -> None:
        self._open: dict[int, dict[int, tuple[float, ...]]] = {}
        self.first_unbegun = 0
        """The first step after those whose maxima a worker was told."""

    def add(self, rank: int, step: int, values: tuple[float, ...], ranks: Collection[int]) -> tuple[float, ...] | None:
        """Takes one worker's numbers; returns the maxima once those of all `ranks`, of that step, are in.

        Raises:
            ProtocolError: a number that is negative, NaN or Inf; a worker that speaks twice; too many open steps.
        """
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ProtocolError("a scalar is negative, NaN or Inf")
        said = self._open.get(step, {})
        if rank in said or (step not in self._open and len(self._open) >= MAX_OPEN):
            raise ProtocolError(f"scalars for step {step} came twice, or for too many steps")
        self._open[step] = said
        said[rank] = values
        return self._end(step) if said.keys() >= set(ranks) else None

    def drop(self, rank: int) -> None:
        """Forgets what a worker said, which pushes nothing any more."""
        for step, said in list(self._open.items()):
            said.pop(rank, None)
            if not said:
                del self._open[step]

    def completed(self, expected: Callable[[int], Collection[int]]) -> list[tuple[int, tuple[float, ...]]]:
        """Ends the steps for which the numbers of all who are expected are in; returns them and the maxima.

        Args:
            expected: returns the ranks that speak of a step.
        """
        done = [step for step, said in self._open.items() if said and said.keys() >= set(expected(step))]
        return [(step, self._end(step)) for step in done]

    def unreachable(self, expected: Callable[[int], Collection[int]], left: Collection[int]) -> str | None:
        """Why a step that some have spoken of can never be complete without those who left, or None.

        Args:
            expected: returns the ranks that speak of a step.
            left: who has left.
        """
        for step, said in self._open.items():
            if said and (absent := set(expected(step)).intersection(left) - said.keys()):
                return LEFT_BEFORE.format(rank=min(absent), moment=f"step {step:,}")
        return None

    def _end(self, step: int) -> tuple[float, ...]:
        self.first_unbegun = max(self.first_unbegun, step + 1)
        return _largest(self._open.pop(step))


def _largest(said: dict[int, tuple[float, ...]]) -> tuple[float, ...]:
    lists = list(said.values())
    return tuple(map(max, *lists)) if len(lists) > 1 else lists[0]


class Digests:
    """Digests of replicas, compared step by step. The first one of a step is what the others must equal."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, str]] = {}

    def add(self, rank: int, step: int, digest: str) -> None:
        """Takes one worker's digest, `instructions:hash`: of the model, and what its processor computes with.

        Raises:
            ProtocolError: the hash differs from another worker's.
        """
        first, expected = self._first.setdefault(step, (rank, digest))
        (theirs, _, other), (ours, _, own) = expected.rpartition(":"), digest.rpartition(":")
        if own != other:
            raise ProtocolError(
                f"its model differs from worker {first}'s before step {step}: replicas have drifted apart. "
                + (_MIXED.format(ours=ours, theirs=theirs) if ours != theirs else _DRIFTED)
            )
        if len(self._first) > MAX_OPEN:
            del self._first[min(self._first)]

    def drop(self, rank: int) -> None:
        """Forgets the digests of a worker that is gone: no other need equal them."""
        self._first = {step: first for step, first in self._first.items() if first[0] != rank}
