"""The state of the timetable of local updates after some inner steps. All workers have the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from thinwire.errors import ConfigError
from thinwire.policies.local_updates import LocalUpdates
from thinwire.states import Count, read


class SavedRounds(msgspec.Struct, frozen=True):
    """What `Rounds.state_dict` returned."""

    iteration: Count
    clock: Count
    flushed_at: Count
    exchanges: list[Count]
    merges_at: list[Count | None]
    whole: list[bool]


class Rounds:
    """The fragments that a worker exchanges after an inner step, and the step before which it merges their averages.

    Args:
        updates: the timetable.

    Attributes:
        iteration: inner steps taken.
        clock: rounds that have ended: every fragment was exchanged once in each.
        exchanges: how often each fragment was exchanged.

    Example:
        >>> rounds = Rounds(LocalUpdates(h=4, fragments=2, delay=1))
        >>> for _ in range(4):
        ...     due = rounds.due()
        ...     rounds.exchanged(due)
        ...     rounds.clock += rounds.ends_round
        ...     rounds.iteration += 1
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
        self.exchanges = [0] * updates.fragments
        self._updates = updates
        self._flushed_at = 0
        self._merges_at: list[int | None] = [None] * updates.fragments
        self._whole = [False] * updates.fragments

    @property
    def every(self) -> range:
        """All fragments."""
        return range(len(self.exchanges))

    @property
    def delay(self) -> int:
        """Inner steps that are taken while an exchange is under way."""
        return self._updates.delay

    @property
    def ends_round(self) -> bool:
        """Whether a round ends with the inner step under way."""
        return self._updates.ends_round(self.iteration)

    @property
    def steps_in_round(self) -> int:
        """Inner steps since a round ended, or since a flush: no other worker has any of them."""
        return min(self._updates.steps_in_round(self.iteration), self.iteration - self._flushed_at)

    @property
    def is_flushed(self) -> bool:
        """Whether no step was taken since a flush, or since the beginning."""
        return self._flushed_at == self.iteration

    def due(self) -> list[int]:
        """Returns the fragments to exchange at the end of the inner step under way.

        After a flush within a round, fragments that were due before it follow with the next one that is due. A worker
        that joined since begins a round, and would wait for them while the others wait for what comes later.
        """
        due = self._updates.fragment_due(self.iteration)
        if due is None:
            return []
        return [f for f, count in enumerate(self.exchanges) if f == due or (f < due and count == self.clock)]

    def exchanged(self, fragments: Sequence[int]) -> None:
        """Says that the exchange of these fragments has begun."""
        for fragment in fragments:
            self.exchanges[fragment] += 1
            self._merges_at[fragment], self._whole[fragment] = self._updates.merges_at(self.iteration), False

    def awaits(self, fragment: int) -> bool:
        """Whether an exchange of a fragment has begun, and is not merged."""
        return self._merges_at[fragment] is not None

    def to_merge(self) -> list[int]:
        """Returns the fragments with averages that the next inner step needs."""
        return [f for f, at in enumerate(self._merges_at) if at is not None and self.iteration >= at]

    def is_whole(self, fragment: int) -> bool:
        """Whether the merge of a fragment keeps nothing of the local parameters."""
        return self._whole[fragment]

    def merge_now(self, fragments: Sequence[int], *, whole: bool) -> None:
        """Has the averages of fragments merged before any further step; of `whole`, nothing local is kept."""
        for fragment in fragments:
            self._merges_at[fragment], self._whole[fragment] = 0, whole or self._whole[fragment]

    def merged(self, fragments: Sequence[int]) -> None:
        """Says that the averages of these fragments are in the local parameters, or were refused by all ranks."""
        for fragment in fragments:
            self._merges_at[fragment], self._whole[fragment] = None, False

    def flush(self) -> list[int] | None:
        """Returns the fragments left in the round under way, and None where no step came since a flush."""
        if self.is_flushed:
            return None
        self._flushed_at = self.iteration
        if self._updates.ends_round(self.iteration - 1):
            return []
        return [fragment for fragment, count in enumerate(self.exchanges) if count == self.clock]

    def state_dict(self) -> dict[str, Any]:
        """Returns where the timetable stands."""
        return {
            "iteration": self.iteration,
            "clock": self.clock,
            "flushed_at": self._flushed_at,
            "exchanges": list(self.exchanges),
            "merges_at": list(self._merges_at),
            "whole": list(self._whole),
        }

    def check_state(self, state: object) -> SavedRounds:
        """Returns what `state_dict` returned as a record. Raises ConfigError where it cannot be that."""
        saved = read(SavedRounds, state, "local rounds")
        lengths = {len(each) for each in (saved.exchanges, saved.merges_at, saved.whole)}
        if lengths != {len(self.exchanges)} or saved.flushed_at > saved.iteration:
            raise ConfigError(f"the state of local rounds is damaged: {saved} for {len(self.exchanges)} fragments")
        return saved

    def load_state_dict(self, state: object) -> None:
        """Takes back what `state_dict` returned. Raises as `check_state`."""
        saved = self.check_state(state)
        self.iteration, self.clock, self._flushed_at = saved.iteration, saved.clock, saved.flushed_at
        self.exchanges, self._merges_at, self._whole = saved.exchanges, saved.merges_at, saved.whole
