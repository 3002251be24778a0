"""The members of a training, and the first clock of each.

A training begins with the workers of its plan. A worker that died is dropped: the others' gradients complete the clocks
without it. A worker that joins later, as a replacement or in addition, is expected from the first clock that no worker
has begun.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from thinwire.policies.sampling import Memberships, extended


class Membership:
    """The ranks that are expected to push.

    Args:
        workers: of the plan, expected from the first clock on.
        quorum: number of gradients that complete a clock while all workers are members; by default all.
        least: the fewest workers that complete a clock; by default `quorum`.

    Example:
        >>> members = Membership(3)
        >>> members.complete(7, {0, 2})
        False
        >>> members.drop(1)
        >>> members.complete(7, {0, 2})  # by default nothing is completed without all three
        False
        >>> members = Membership(3, least=2)
        >>> members.drop(1)
        >>> members.complete(7, {0, 2})
        True
        >>> members.admit(1, clock=9)
        >>> members.complete(8, {0, 2}), members.complete(9, {0, 2})
        (True, False)
    """

    def __init__(self, workers: int, quorum: int | None = None, least: int | None = None) -> None:
        self._workers, self._quorum = workers, workers if quorum is None else quorum
        self.least = self._quorum if least is None else least
        self._since = dict.fromkeys(range(workers), 0)
        self.history: Memberships = ((0, self.ranks),)
        """The ranks that divide the data, by their first clock."""
        self.since = 0
        """The clock of the last `divide_data`."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The expected ranks, now or from a later clock on."""
        return tuple(sorted(self._since))

    @property
    def lockstep(self) -> bool:
        """Whether every member's gradient is needed."""
        return self._quorum == self._workers

    @property
    def highest(self) -> int:
        """The largest rank; −1 without members."""
        return max(self._since, default=-1)

    @property
    def lowest(self) -> int:
        """The rank whose buffers all workers take; −1 without members."""
        return min(self._since, default=-1)

    def expected(self, clock: int) -> tuple[int, ...]:
        """Returns the ranks whose gradients of a clock are expected."""
        return tuple(rank for rank in self.ranks if self.expects(rank, clock))

    def expects(self, rank: int, clock: int) -> bool:
        """Whether a worker's gradient of a clock is expected."""
        return self._since.get(rank, clock + 1) <= clock

    def needed(self, clock: int) -> int:
        """Returns how many of the expected gradients complete a clock."""
        return self._needed_of(len(self._begun(clock)))

    def _needed_of(self, expected: int) -> int:
        spare = self._workers - self._quorum
        return max(1, expected - spare if expected > self._workers else min(self._quorum, expected))

    def _begun(self, clock: int) -> Set[int]:
        """Returns the ranks whose gradients of a clock are expected; called for every table of every push."""
        if max(self._since.values(), default=0) <= clock:
            return self._since.keys()
        return {rank for rank, since in self._since.items() if since <= clock}

    def complete(self, clock: int, arrived: Set[int]) -> bool:
        """Whether enough gradients of a clock are in.

        Args:
            clock: of the gradients.
            arrived: the ranks whose gradients are in, including workers that were dropped since.
        """
        if len(self._since) < self.least:
            return False
        begun = self._begun(clock)
        if not begun:
            # The expected workers have left, and the members begin later: no gradient will complete the clock.
            return bool(self._since)
        return len(begun & arrived) >= self._needed_of(len(begun))

    def reachable(self, clock: int, arrived: Collection[int], left: Collection[int]) -> bool:
        """Whether enough gradients of a clock can still arrive without these ranks, which have left."""
        possible = sum(since <= clock and (r in arrived or r not in left) for r, since in self._since.items())
        return possible >= self.needed(clock)

    def drop(self, rank: int) -> None:
        """Stops expecting a worker."""
        self._since.pop(rank, None)

    def admit(self, rank: int, clock: int) -> None:
        """Expects a worker from a clock on."""
        self._since[rank] = clock

    def divide_data(self, clock: int) -> None:
        """Makes the present members divide the data from this clock on."""
        self.history, self.since = extended(self.history, clock, self.ranks), clock
