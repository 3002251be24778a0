"""Whether other programs computed on this machine while something was measured, which spoils its seconds."""

from __future__ import annotations

import os

from thinwire.planner.utilisation import Sample, sample

SHARE = 0.1
"""Of all processors' time: less is what any system does beside."""
FULL = 0.75
"""With less of the processors in use, the other work had some of its own."""


class OtherWork:
    """Measures, from its creation on, what processes other than this one and its children compute.

    Example:
        >>> 0.0 <= OtherWork().share() <= 1.0
        True
    """

    def __init__(self) -> None:
        self._machine, self._own_s = _machine(), _own_s()

    def share(self) -> float:
        """Returns the others' part of all processors' time, 0 … 1; 0 where the system does not say, or they had
        processors of their own to compute on."""
        now, before = _machine(), self._machine
        if now is None or before is None or now.machine_s <= before.machine_s:
            return 0.0
        whole_s, busy_s = now.machine_s - before.machine_s, now.machine_busy_s - before.machine_busy_s
        others = min(1.0, max(0.0, busy_s - (_own_s() - self._own_s)) / whole_s)
        return others if others >= SHARE and busy_s >= FULL * whole_s else 0.0

    def remark(self) -> str | None:
        """Returns a sentence where there is something to say."""
        if not (share := self.share()):
            return None
        return (
            f"other programs took {100 * share:.0f} % of this machine's processors meanwhile, so that measured seconds "
            "are too long by nobody knows how much: plan again when it has nothing else to do"
        )


def _machine() -> Sample | None:
    try:
        return sample({})
    except (OSError, ValueError, IndexError):
        return None  # no Linux, or a container that hides it


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
