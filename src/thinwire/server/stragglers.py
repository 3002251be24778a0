"""How long exchanges take, and so for how long the slowest worker of one is waited for.

A worker is late where the exchange under way has taken longer than median + max(floor, 6 · MAD) of the recent ones, and
enough others are there. Times come as arguments, now and then; exchanges that are shorter than the time between two
calls are averaged.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from thinwire.errors import ConfigError

RECENT = 64
"""Exchanges that count."""
ENOUGH = 8
"""With fewer nobody is late: the first ones hold what is done once, such as compiling."""
DEVIATIONS = 6
"""In units of the median absolute deviation; of normally distributed times it is exceeded once in 20,000 exchanges."""


class Stragglers:
    """The times of recent exchanges.

    Args:
        floor_s: what is waited for beyond the median, at least, in seconds.

    Raises:
        ConfigError: it is not positive.

    Example:
        >>> stragglers = Stragglers(floor_s=1.0)
        >>> any(stragglers.overdue(step, 0.5 * step, (0, 1)) for step in range(9))
        False
        >>> stragglers.overdue(8, 5.4, (0, 1)), stragglers.overdue(8, 5.6, (0, 1))
        (False, True)
    """

    def __init__(self, floor_s: float) -> None:
        if not floor_s > 0:
            raise ConfigError(f"a straggler's grace of {floor_s} s; it must be positive")
        self._floor_s = floor_s
        self._times: deque[float] = deque(maxlen=RECENT)
        self._step = -1
        self._since = 0.0
        self._ranks: tuple[int, ...] = ()

    def overdue(self, step: int, now: float, ranks: tuple[int, ...]) -> bool:
        """Whether the exchange under way takes too long.

        Args:
            step: how many there were before it.
            now: the time, in seconds.
            ranks: of those who take part. Where they change, what the change takes is no exchange's time.
        """
        if ranks != self._ranks or step < self._step:
            self.forgive(step, now, ranks)
        elif step > self._step:
            exchanges = step - self._step
            self._times.extend([(now - self._since) / exchanges] * min(exchanges, RECENT))
            self._step, self._since = step, now
        return len(self._times) >= ENOUGH and now - self._since > self.patience_s

    def forgive(self, step: int, now: float, ranks: tuple[int, ...]) -> None:
        """Begins to count anew: the time until now is no exchange's."""
        self._step, self._since, self._ranks = step, now, ranks

    @property
    def patience_s(self) -> float:
        """After this time an exchange is overdue, in seconds."""
        typical = median(self._times)
        spread = median(abs(each - typical) for each in self._times)
        return typical + max(self._floor_s, DEVIATIONS * spread)
