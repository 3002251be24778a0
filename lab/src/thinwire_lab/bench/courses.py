"""The rates of links during a measured run: one rate, or several in turn, by steps or by the clock.

The launcher asks a course for the rate after every step and at least every `poll_s` seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from thinwire.errors import ConfigError
from thinwire.transports.links import Rate, parse_rate

SETTLE_S = 0.5
"""Covers the change of all queues, one after the other: 0.17 s for five links on a busy machine."""
PARTS = 5
"""The figure of many steps is the median over this many parts' means."""


@dataclass(frozen=True)
class Stepping:
    """One rate, or several in a cycle by the clock, each for `every_s` seconds.

    After `limit_s` seconds of training, if given, the run ends at the end of a period between exchanges: a partial
    period would have too few exchanges.
    """

    links: tuple[Rate, ...]
    every_s: float = math.inf
    limit_s: float | None = None
    period: int = 1

    def __post_init__(self) -> None:
        if not self.links or not self.every_s > 0:
            raise ConfigError(f"{len(self.links)} rates, each for {self.every_s} s; expected at least one, and above 0")
        if self.poll_s is not None and any(each.bps is None for each in self.links):
            raise ConfigError("a link with several rates needs a limit in each; a change from no limit loses packets")

    @property
    def poll_s(self) -> float | None:
        """The longest interval between two calls of `rate`, in seconds; None: after steps alone."""
        return None if math.isinf(self.every_s) else 0.1

    def rate(self, now_s: float, elapsed: Sequence[float]) -> Rate | None:
        """Returns the rate at a time, given the seconds of training after each step; None ends the run."""
        whole = bool(elapsed) and len(elapsed) % self.period == 0
        if self.limit_s is not None and whole and elapsed[-1] > self.limit_s:
            return None
        return self.links[int(now_s // self.every_s) % len(self.links)]


def course(text: str | None, limit_s: float | None = None, period: int = 1) -> Stepping:
    """Returns the course of a link's name: a rate, or several with `/` between and `@` the seconds of each."""
    rates, stepping, every_s = (text or "none").partition("@")
    links = tuple(parse_rate(each) for each in rates.split("/"))
    if not stepping and len(links) == 1:
        return Stepping(links, math.inf, limit_s, period)
    try:
        seconds = float(every_s)
    except ValueError as error:
        raise ConfigError(f"link {text!r}: after @ come the seconds of each rate, as in 100mbit/10mbit@60") from error
    return Stepping(links, seconds, limit_s, period)


@dataclass
class Sweep:
    """One rate after another, each until its step time is measured.

    A message under way during a change belongs to neither rate: the measurement leaves out the first two exchanges at a
    rate and all of its first half second; only the first exchange if two take longer than the time.
    """

    links: Sequence[Rate]
    seconds: float
    most: int = 60
    period: int = 1
    settle: int = 2
    poll_s: ClassVar[float | None] = None
    step_s: list[float] = field(default_factory=list, init=False)
    """Seconds of a step at each finished rate."""
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
    """Returns the median over the means of up to five equal parts, so that a pause in one part has no effect.

    >>> middle([1, 3, 1, 3, 1, 3, 1, 3, 1, 30])
    2.0
    """
    parts = min(PARTS, len(seconds))
    size = len(seconds) // parts
    return statistics.median(statistics.fmean(seconds[at * size : (at + 1) * size]) for at in range(parts))


Course = Stepping | Sweep
"""Decides the rate of the links and the end of a run."""
