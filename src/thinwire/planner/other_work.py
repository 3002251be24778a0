"""Whether other programs computed on this machine while something was measured, which spoils its seconds."""

from __future__ import annotations

import os
from pathlib import Path

SHARE = 0.1
"""Of all processors' time: less is what any system does beside."""
FULL = 0.75
"""With less of the processors in use, the other work had some of its own."""


class OtherWork:
    """Measures, from its creation on, what processes other than this one and its children compute.

    Example:
        >>> OtherWork().share() in (None, 0.0)
        True
    """

    def __init__(self) -> None:
        self._before = _seconds()

    def share(self) -> float | None:
        """Returns the others' part of all processors' time; None where the system does not say, or it is no matter."""
        now, before = _seconds(), self._before
        if now is None or before is None or now[0] <= before[0]:
            return None
        whole_s, busy_s, own_s = (after - first for after, first in zip(now, before, strict=True))
        others = min(1.0, (busy_s - own_s) / whole_s)
        return others if others >= SHARE and busy_s >= FULL * whole_s else None

    def remark(self) -> str | None:
        """Returns a sentence where there is something to say."""
        if not (share := self.share()):
            return None
        return (
            f"other programs took {100 * share:.0f} % of this machine's processors meanwhile, so that measured seconds "
            "are too long: plan again when it has nothing else to do"
        )


def _seconds() -> tuple[float, float, float] | None:
    """All processors' time, the part that was computed, and this process's with its children."""
    try:
        fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
        times = [int(each) / os.sysconf("SC_CLK_TCK") for each in fields]
        return sum(times), sum(times) - times[3] - times[4], sum(os.times()[:4])
    except (OSError, ValueError, IndexError):
        return None  # no Linux, or a container that hides it
