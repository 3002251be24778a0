"""Time as the runtime asks for it: what time it is, and a call at a later one. A test or a simulator brings its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

Cancel = Callable[[], None]
"""Makes a later call not happen; does nothing once it has."""


class Clock(Protocol):
    """A time that never goes back, in seconds from any point, and calls at a later time."""

    def now(self) -> float:
        """Returns the time, in seconds."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Cancel:
        """Calls `callback` once, `delay_s` seconds from now, on any thread; returns what cancels that."""


class SystemClock:
    """The machine's monotonic clock.

    Example:
        >>> cancel = SystemClock().call_later(60.0, lambda: print("too late"))
        >>> cancel()
    """

    def now(self) -> float:
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Cancel:
        timer = threading.Timer(delay_s, callback)
        timer.daemon = True
        timer.start()
        return timer.cancel
