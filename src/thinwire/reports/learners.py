"""Learners that never wait, in step records: when each computed, how fast, and which share was merged."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire.telemetry import StepRecord

RECENT = 8
"""Merges of a learner that its speed now is taken from."""


class Merged(NamedTuple):
    """One learner's part of a version."""

    time_s: float
    step: int
    weight: float
    version: int


class Span(NamedTuple):
    """A time in which a learner computed, in seconds since 1970."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class LearnerFigures:
    """One learner.

    Attributes:
        rank: its number.
        step: inner steps of its newest merged contribution.
        version: that holds it.
        weight: of that contribution.
        speed: merged steps a second, over its newest merges; None before the second.
        best: the highest such speed so far.
        silent_s: seconds from its newest merge to the newest of all.
    """

    rank: int
    step: int
    version: int
    weight: float
    speed: float | None
    best: float | None
    silent_s: float


class Learners:
    """The merges in step records.

    Example:
        >>> learners = Learners()
        >>> for number in range(1, 9):
        ...     learners.add(StepRecord(step=number, table="", numel=0, time_s=10.0 * number, version=number,
        ...                             learners=((0, 24 * number, 0.75), (1, 8 * number, 0.25))))
        >>> [(each.rank, each.step, each.speed) for each in learners.figures()]
        [(0, 192, 2.4), (1, 64, 0.8)]
        >>> learners.goodput()
        1.0
    """

    def __init__(self) -> None:
        self._merges: defaultdict[int, list[Merged]] = defaultdict(list)

    def add(self, record: StepRecord) -> None:
        """Takes a record; most have no merge. Several learners record the same version: the first counts."""
        for rank, step, weight in record.learners:
            known = self._merges[rank]
            if not known or known[-1].version < record.version:
                known.append(Merged(record.time_s, step, weight, record.version))

    @property
    def newest_s(self) -> float:
        """When the newest merge came, in seconds since 1970; 0 before the first."""
        return max((each[-1].time_s for each in self._merges.values() if each), default=0.0)

    def figures(self) -> list[LearnerFigures]:
        """Returns the figures of every learner, by rank."""
        found = []
        for rank, merges in sorted(self._merges.items()):
            speeds = [_speed(merges[max(0, end - RECENT) : end]) for end in range(2, len(merges) + 1)]
            known = [each for each in speeds if each is not None]
            found.append(
                LearnerFigures(
                    rank=rank,
                    step=merges[-1].step,
                    version=merges[-1].version,
                    weight=merges[-1].weight,
                    speed=known[-1] if known else None,
                    best=max(known, default=None),
                    silent_s=self.newest_s - merges[-1].time_s,
                )
            )
        return found

    def goodput(self) -> float | None:
        """Returns the sum of all learners' mean speeds over the sum of their best; None before there are speeds.

        A learner's mean is over the whole training, the time in which it was away included.
        """
        figures = [each for each in self.figures() if each.best]
        begin = min((each[0].time_s for each in self._merges.values()), default=0.0)
        if not figures or self.newest_s <= begin:
            return None
        done = sum(sum(_taken(one, other) for one, other in pairwise(each)) for each in self._merges.values())
        return min(1.0, done / (self.newest_s - begin) / sum(each.best or 0.0 for each in figures))

    def spans(self, rank: int) -> Iterator[Span]:
        """Yields when a learner computed, as far as its merged contributions tell."""
        merges = self._merges[rank]
        usual = statistics.median([other.time_s - one.time_s for one, other in pairwise(merges)] or [0.0])
        pace = statistics.median(
            [(other.time_s - one.time_s) / max(1, _taken(one, other)) for one, other in pairwise(merges)] or [0.0]
        )
        begin = merges[0].time_s - merges[0].step * pace
        for one, other in pairwise(merges):
            resumed = max(one.time_s, other.time_s - _taken(one, other) * pace)
            if other.step < one.step or resumed - one.time_s > usual:  # it was away
                yield Span(begin, one.time_s)
                begin = resumed
        yield Span(begin, merges[-1].time_s)

    def table(self) -> Table:
        """Returns a line for every learner."""
        lines = [
            [
                *(str(each.rank), f"{each.step:,}", "–" if each.speed is None else f"{each.speed:.3g}"),
                *(f"{each.version:,}", f"{each.weight:.0%}", f"{each.silent_s:.1f} s"),
            ]
            for each in self.figures()
        ]
        return Table(["learner", "steps merged", "steps/s", "version", "weight", "before the newest"], lines)

    def chart(self) -> Chart | None:
        """Returns who computed when, as a picture; None without merges."""
        if not self._merges:
            return None
        begin = min(span.begin_s for rank in self._merges for span in self.spans(rank))
        series = []
        for rank in sorted(self._merges):
            spans = list(self.spans(rank))
            series.append(
                Series(
                    label=f"learner {rank}",
                    x=[(span.begin_s + span.end_s) / 2 - begin for span in spans],
                    y=[float(rank)] * len(spans),
                    error=[(span.end_s - span.begin_s) / 2 for span in spans],
                )
            )
        told = "Who computed when: a bar ends where a learner stopped, and begins again where it had come back."
        if (goodput := self.goodput()) is not None:
            told += f" Goodput: {goodput:.0%} of the learners' best speeds."
        panel = Panel(title="learners", x_label="seconds", y_label="learner", series=series, kind="spans")
        return Chart(name="learners", caption=told, panels=[panel])


def _taken(one: Merged, other: Merged) -> int:
    """Steps between two merges; a process that began anew counts from 0."""
    return other.step - one.step if other.step >= one.step else other.step


def _speed(merges: list[Merged]) -> float | None:
    seconds = merges[-1].time_s - merges[0].time_s
    taken = sum(_taken(one, other) for one, other in pairwise(merges))
    return taken / seconds if seconds > 0 else None
