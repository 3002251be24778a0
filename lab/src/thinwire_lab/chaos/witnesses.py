"""The times of faults of workers, of the reports of a death, and of each return."""

from __future__ import annotations

import math
import re

from thinwire.runtime.journal import AnyEntry, Joined, Took

_NOTICE = re.compile(r"warning: worker (\d+) (?:lost its connection|went away|was not connected)")


class Witnesses:
    """Keeps the times of faults of workers. All times are seconds since the epoch.

    Each witness adds to `said` the seconds after which it first reported a death, and each worker that takes part
    again adds to `back` the seconds since its death or the end of its fault, to `joining` those since its Join. From
    the times in `waiting` on, a struck worker may be back.
    """

    def __init__(self) -> None:
        self.said: list[float] = []
        self.back: list[float] = []
        self.joining: list[float] = []
        self.waiting: dict[int, float] = {}
        self._struck: dict[int, float] = {}
        self._dead: set[int] = set()
        self._heard: dict[int, set[int]] = {}
        self._joined: dict[int, float] = {}

    def strike(self, rank: int, at: float, *, lasts: bool = False, dies: bool = False, for_good: bool = False) -> None:
        """A worker is struck. One that `dies` has to join anew; one whose fault `lasts` is away until then."""
        self._struck[rank], self._heard[rank] = at, set()
        (self._dead.add if dies else self._dead.discard)(rank)
        if not for_good:
            self.waiting[rank] = math.inf if lasts else at

    def lift(self, rank: int, at: float) -> None:
        """The worker may be back from now on."""
        self.waiting[rank] = at

    def hear(self, witness: int, text: str, at: float) -> None:
        """Another worker has printed a line."""
        found = _NOTICE.search(text)
        victim = int(found[1]) if found else -1
        if victim in self._struck and witness not in self._heard[victim]:
            self._heard[victim].add(witness)
            self.said.append(at - self._struck[victim])

    def read(self, entry: AnyEntry) -> None:
        match entry:
            case Joined():
                self._joined[entry.rank] = entry.at
                self._dead.discard(entry.rank)
            case Took() if entry.rank not in self._dead and entry.at > self.waiting.get(entry.rank, math.inf):
                since = self.waiting.pop(entry.rank)
                self.back.append(entry.at - since)
                if (joined := self._joined.get(entry.rank, 0.0)) > since:
                    self.joining.append(entry.at - joined)
