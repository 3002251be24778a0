"""The rates of links during a measured run: one rate, or one after another, by steps or by the clock.

A course is asked after every step, and at least every `poll_s` seconds; ranks know nothing of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Protocol

from thinwire.errors import ConfigError
from thinwire.transports.links import Rate, parse_rate

SETTLE_S = 0.5
"""Queues are changed one after the other, which took 0.17 s for five links on a busy machine."""
PARTS = 5
"""A stretch of steps is cut into so many, and the median of their means is its figure."""


class Course(Protocol):
    """Says what the links carry, and when a run has gone on for long enough."""

    @property
    def poll_s(self) -> float | None:
        """How often to ask, in seconds, where no step ends; None: after steps alone."""

    def rate(self, now_s: float, elapsed: Sequence[float]) -> Rate | None:
        """Returns the rate from now on, after seconds of thin links and of training by step; None ends the run."""


@dataclass(frozen=True)
class Steady:
    """One rate, until the training has taken so many seconds; None: until its last step."""

    link: Rate
    limit_s: float | None = None
    period: int = 1
    poll_s: ClassVar[float | None] = None

    def rate(self, now_s: float, elapsed: Sequence[float]) -> Rate | None:
        return None if _over(self.limit_s, self.period, elapsed) else self.link


@dataclass(frozen=True)
class Stepping:
    """One rate after another, each for so many seconds, and again from the first.

    Example:
        >>> course = Stepping((Rate(100_000_000), Rate(10_000_000)), every_s=60)
        >>> [str(course.rate(now_s, [])) for now_s in (0, 59.9, 60, 121)]
        ['100mbit', '100mbit', '10mbit', '100mbit']
    """

    links: tuple[Rate, ...]
    every_s: float
    limit_s: float | None = None
    period: int = 1
    poll_s: ClassVar[float | None] = 0.1

    def __post_init__(self) -> None:
        if not self.links or not self.every_s > 0:
            raise ConfigError(
                f"{len(self.links)} rates, each for {self.every_s} s; expected one or more, and some time"
            )
        if any(each.bps is None for each in self.links):
            raise ConfigError("a link that steps has a limit at every step; packets would be lost where it got one")

    def rate(self, now_s: float, elapsed: Sequence[float]) -> Rate | None:
        if _over(self.limit_s, self.period, elapsed):
            return None
        return self.links[int(now_s // self.every_s) % len(self.links)]


def _over(limit_s: float | None, period: int, elapsed: Sequence[float]) -> bool:
    """Whether a run has taken longer than it may, and is at the end of a period."""
    return limit_s is not None and bool(elapsed) and elapsed[-1] > limit_s and len(elapsed) % period == 0


def course(text: str | None, limit_s: float | None = None, period: int = 1) -> Steady | Stepping:
    """Returns the course that a link's name says: a rate, or several with `/` between and `@` the seconds of each.

    Example:
        >>> course("100mbit/5mbit@1").every_s, course("10mbit").link
        (1.0, Rate(bps=10000000))
    """
    rates, stepping, every_s = (text or "none").partition("@")
    if not stepping and "/" not in rates:
        return Steady(parse_rate(rates), limit_s, period)
    links = tuple(parse_rate(each) for each in rates.split("/"))
    try:
        seconds = float(every_s)
    except ValueError as error:
        raise ConfigError(f"link {text!r}: after @ come the seconds of each rate, as in 100mbit/10mbit@60") from error
    return Stepping(links, seconds, limit_s, period)


@dataclass
class Sweep:
    """One rate after another, each until its step time is known, and then the end.

    A message on its way when a rate changes belongs to neither: the first two exchanges at a rate are not counted, nor
    what else is of its first half second; or the first alone where two take longer than there is time.
    """

    links: Sequence[Rate]
    seconds: float
    most: int = 60
    period: int = 1
    settle: int = 2
    poll_s: ClassVar[float | None] = None
    step_s: list[float] = field(default_factory=list, init=False)
    """Of each rate so far, seconds of a step."""
    _began: int = field(default=0, init=False)

    def rate(self, now_s: float, elapsed: Sequence[float]) -> Rate | None:
        ends = [0.0, *elapsed][self._began :: self.period]
        taken = len(ends) - 1
        settled = (at for at in range(self.settle, taken) if ends[at] - ends[0] >= SETTLE_S)
        first = next(settled, taken - 1)
        if taken >= self.settle and (taken - first >= self.most or ends[-1] - ends[0] >= self.seconds):
            self.step_s.append(middle([after - before for before, after in pairwise(ends[first:])]) / self.period)
            self._began = len(elapsed)
        return self.links[len(self.step_s)] if len(self.step_s) < len(self.links) else None


def middle(seconds: Sequence[float]) -> float:
    """Returns the median of the means of up to five equal parts: a pause in one of them leaves it as it is.

    >>> middle([1, 3, 1, 3, 1, 3, 1, 3, 1, 30])
    2.0
    """
    parts = min(PARTS, len(seconds))
    size = len(seconds) // parts
    return statistics.median(statistics.fmean(seconds[at * size : (at + 1) * size]) for at in range(parts))
