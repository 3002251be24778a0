"""The timetable of local updates as it stands after some inner steps. All ranks have the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.policies.local_updates import LocalUpdates


class Rounds:
    """Which fragments a rank exchanges after an inner step, and before which one it merges their averages.

    Args:
        updates: the timetable.

    Attributes:
        iteration: inner steps taken.
        clock: rounds that have ended: every fragment was exchanged once in each.

    Example:
        >>> rounds = Rounds(LocalUpdates(h=4, fragments=2, delay=1))
        >>> for _ in range(4):
        ...     due = rounds.due()
        ...     rounds.exchanged(due)
        ...     ended = rounds.step_taken()
        ...     print(due, rounds.to_merge())
        ...     rounds.merged(rounds.to_merge())
        [] []
        [0] []
        [] [0]
        [1] []
        >>> rounds.clock
        1
    """

    def __init__(self, updates: LocalUpdates) -> None:
        self.iteration = self.clock = 0
        self._updates = updates
        self._flushed_at = 0
        self._exchanges = [0] * updates.fragments
        self._merges_at: list[int | None] = [None] * updates.fragments

    def due(self) -> list[int]:
        """Returns the fragments to exchange at the end of the inner step under way.

        After a flush within a round, fragments whose turn was before it follow with the next one that is due.
        """
        due = self._updates.fragment_due(self.iteration)
        if due is None:
            return []
        return [f for f, count in enumerate(self._exchanges) if f == due or (f < due and count == self.clock)]

    @property
    def delay(self) -> int:
        """Inner steps that are taken while an exchange is under way."""
        return self._updates.delay

    def exchanged(self, fragments: Sequence[int]) -> None:
        """Says that the exchange of these fragments has begun."""
        for fragment in fragments:
            self._exchanges[fragment] += 1
            self._merges_at[fragment] = self._updates.merges_at(self.iteration)

    def awaits(self, fragment: int) -> bool:
        """Whether an exchange of a fragment has begun, and is not merged."""
        return self._merges_at[fragment] is not None

    def step_taken(self) -> bool:
        """Ends the inner step under way; returns whether a round ended with it."""
        ends = self._updates.ends_round(self.iteration)
        self.clock += ends
        self.iteration += 1
        return ends

    def to_merge(self) -> list[int]:
        """Returns the fragments whose averages the next inner step needs."""
        return [f for f, at in enumerate(self._merges_at) if at is not None and self.iteration >= at]

    def merged(self, fragments: Sequence[int]) -> None:
        """Says that the averages of these fragments are in the local parameters, or were refused by all ranks."""
        for fragment in fragments:
            self._merges_at[fragment] = None

    def flush(self) -> list[int] | None:
        """Ends the round under way; returns the fragments left in it, and None where no step came since a flush."""
        if self._flushed_at == self.iteration:
            return None
        self._flushed_at = self.iteration
        if self._updates.ends_round(self.iteration - 1):
            return []
        left = [fragment for fragment, count in enumerate(self._exchanges) if count == self.clock]
        self.clock += 1
        return left

    def state_dict(self) -> dict[str, Any]:
        """Returns where the timetable stands."""
        return {
            "iteration": self.iteration,
            "clock": self.clock,
            "flushed_at": self._flushed_at,
            "exchanges": list(self._exchanges),
            "merges_at": list(self._merges_at),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` returned."""
        self.iteration, self.clock, self._flushed_at = (int(state[n]) for n in ("iteration", "clock", "flushed_at"))
        self._exchanges, self._merges_at = list(state["exchanges"]), list(state["merges_at"])
