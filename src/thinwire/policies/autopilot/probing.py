"""How the link is measured: by messages that suit what is known of it, again where it looks slower, at a known cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

PROBE_ENOUGH_S = 0.04
"""A message that takes so long tells the rate of a link, also where busy processors delay each by 10 ms or two."""
TRIES = 3
"""Busy processors make a link look slower, never faster: what is slower than known is measured so often."""
FEWEST, MOST = 64, 4096
"""Notes from one measurement of the link to the next, or where notes do not tell of the link, steps."""
SHARE, DOUBTED_SHARE = 0.005, 0.02
"""Of the time that goes into measuring the link every so often, and for doubts."""
MOST_CREDIT = 4
"""Measurements for doubts that may follow one upon the other; a training begins with as many."""
_MESSAGES_S, _MESSAGES_BITS = 0.1, 8 * 65536


class Controller(Protocol):
    """Who wants the link measured; see `Pilot`."""

    @property
    def probe_nbytes(self) -> int: ...

    def believes(self, bps: float) -> bool: ...

    def take_link(self, bps: float, tries: int) -> None: ...


def cost_s(bps: float) -> float:
    """Returns the seconds that one measurement takes, roughly; of an unknown link, those without its largest message.

    >>> cost_s(0.0), cost_s(2**19)
    (0.1, 1.1)
    """
    return _MESSAGES_S + (_MESSAGES_BITS / bps if bps else 0.0)


def period(bps: float, step_s: float) -> int:
    """Returns the notes, or steps, from one measurement to the next, so that they take a small share of the time."""
    return max(FEWEST, math.ceil(min(MOST, cost_s(bps) / (SHARE * step_s))))


def probe(pilot: Controller, once: Callable[[int], float]) -> None:
    """Measures the link for a controller that wants it; all ranks together.

    Args:
        pilot: takes the measurement.
        once: measures once with messages of so many bytes or more, and returns bits per second, on all ranks the same.
    """
    best, tries = 0.0, 0
    while tries < TRIES:
        best, tries = max(best, once(pilot.probe_nbytes)), tries + 1
        if pilot.believes(best):
            break
    pilot.take_link(best, tries)
