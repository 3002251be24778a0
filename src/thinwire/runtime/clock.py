"""The runtime's clock: the current time, and delayed calls. Tests and simulations replace it."""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from thinwire.errors import ConfigError

MOMENT_S = 1.0
"""A break of a worker's connection that lasts longer is reported to the other workers and the server's log."""

MAX_WAIT_S = 1e6
"""Eleven days: longer than any wait of a training, and far below the limit of the system's waits."""
_LONGEST_SLEEP_S = 3600.0

Cancel = Callable[[], None]
"""Cancels a delayed call; has no effect after the call."""


def in_seconds(timeout: float | timedelta) -> float:
    """Returns a duration, given in seconds or as a timedelta, in seconds.

    >>> in_seconds(1.5), in_seconds(timedelta(minutes=1))
    (1.5, 60.0)
    """
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


def check_seconds(**given: float) -> None:
    """Raises ConfigError where one of these durations, by option name, is not between 0 and `MAX_WAIT_S`.

    >>> check_seconds(timeout_s=600.0)
    >>> check_seconds(timeout_s=float("inf"))
    Traceback (most recent call last):
        ...
    thinwire.errors.ConfigError: timeout_s is inf; give 0 to 1000000 seconds
    """
    for name, seconds in given.items():
        if not (isinstance(seconds, int | float) and 0 <= seconds <= MAX_WAIT_S):  # refuses NaN, too
            raise ConfigError(f"{name} is {seconds!r}; give 0 to {MAX_WAIT_S:.0f} seconds")


class Clock(Protocol):
    """A monotonic time in seconds, from an arbitrary zero, and delayed calls."""

    def now(self) -> float:
        """Returns the time, in seconds."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Cancel:
        """Calls `callback` once, `delay_s` seconds from now, on any thread; returns a function that cancels it."""


class SystemClock:
    """The machine's monotonic clock. One thread makes all delayed calls, and ends after the last.

    Example:
        >>> cancel = SystemClock().call_later(60.0, lambda: print("too late"))
        >>> cancel()
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        """Times and calls, in order; the number keeps calls of one time in order."""
        self._num_made = 0
        self._running = False

    def now(self) -> float:
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Cancel:
        with self._changed:
            later = self.now() + delay_s, self._num_made, callback
            self._num_made += 1
            insort(self._waiting, later)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="thinwire-clock", daemon=True).start()
            self._changed.notify()

        def cancel() -> None:
            with self._changed, suppress(ValueError):
                self._waiting.remove(later)
                self._changed.notify()

        return cancel

    def _run(self) -> None:
        while (callback := self._next()) is not None:
            callback()

    def _next(self) -> Callable[[], None] | None:
        """Waits for the next call's time; None where no call waits."""
        with self._changed:
            while self._waiting:
                when, _, callback = self._waiting[0]
                if (left := when - self.now()) <= 0:
                    del self._waiting[0]
                    return callback
                self._changed.wait(min(left, _LONGEST_SLEEP_S))  # the system refuses very long waits
            self._running = False
            return None
