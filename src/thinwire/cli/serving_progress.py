"""Progress lines of `thinwire server`: workers that join and leave, steps, and sums at the end."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from thinwire.quantities import counted, moment_text, nbytes_text
from thinwire.runtime.clock import MOMENT_S

PROGRESS_S = 10.0
"""Between two lines on how far the training is."""


class ServingProgress:
    """Reads a shard's state from time to time, and prints the changes.

    Args:
        core: the shard, a `ServerCore`, whose values the server's thread changes.
        tell: takes a line.
        now: a time in seconds.
        grace_s: seconds that the server waits for a worker whose connection broke.
        min_workers: the server updates nothing with fewer; None: it needs all.
    """

    def __init__(
        self,
        core: Any,
        tell: Callable[[str], None],
        now: Callable[[], float],
        grace_s: float = 0.0,
        min_workers: int | None = None,
    ) -> None:
        self._core, self._tell, self._now, self._grace_s = core, tell, now, grace_s
        self._least = min_workers or 0
        self._broken: dict[int, float] = {}
        self._told_broken: set[int] = set()
        self._sessions: dict[int, int] = {}
        self._seen: set[int] = set()
        self._began: float | None = None
        self._first = self._step = self._looked = core.step
        self._told = self._waited = now()

    def look(self, received: int, sent: int) -> None:
        """Prints workers that joined or left since the last call, and every ten seconds the step.

        Args:
            received, sent: bytes of the whole training so far.
        """
        core, now = self._core, self._now()
        sessions, left, step = core.sessions, set(core.left), core.step
        here, before = set(sessions), self._sessions
        at = f" at {moment_text(step, core.steps_each)}"
        # A look may come many steps after the first one: only a later one knows who came late.
        late = at if self._looked > self._first else ""
        lines = [
            f"worker {rank} joined{' again' if rank in self._seen else ''}{late}"
            for rank in sorted(here)
            if sessions[rank] != before.get(rank)
        ]
        lines += [
            f"worker {rank} {'has reached the end' if rank in left else 'is gone'}{at}"
            for rank in sorted(before.keys() - here)
        ]
        # Between two looks: nothing was left to do.
        lines += [f"worker {rank} joined, and has reached the end{at}" for rank in sorted(left - here - self._seen)]
        for line in lines:
            self._tell(f"{line}; {len(here)} here")
        self._tell_broken(dict(sessions.items() & before.items()), at, now)
        self._looked, self._sessions = step, sessions
        self._seen |= here | left
        if self._seen and self._began is None:
            self._began = self._told = now
        if (waited := now - self._told) >= PROGRESS_S and step > self._step:
            rate, unit = (step - self._step) / waited, self._unit
            self._tell(f"{at.removeprefix(' at ')}  {rate:.1f} {unit}s/s  {_traffic(received, sent)}")
            self._told, self._step = now, step
        self._tell_missing(here, left, now)

    def _tell_broken(self, same: Collection[int], at: str, now: float) -> None:
        """Prints each break of more than a moment once, and its end where the same process is back."""
        broken = set(self._core.interrupted_ranks)
        for rank in sorted(self._told_broken - broken):
            if rank in same:
                self._tell(f"worker {rank} is connected again{at}")
        self._told_broken &= broken
        self._broken = {rank: self._broken.get(rank, now) for rank in broken}
        for rank in sorted(rank for rank in broken - self._told_broken if now - self._broken[rank] >= MOMENT_S):
            self._told_broken.add(rank)
            self._tell(f"worker {rank} lost its connection{at}; waited for, {self._grace_s:g} s at most")

    def _tell_missing(self, here: set[int], left: set[int], now: float) -> None:
        """Prints every ten seconds that workers are missing, or that too few are here, where some are."""
        never = sorted(set(self._core.missing) - here - (self._seen if self._core.begun else set()))
        too_few = len(here | left) < self._least
        if not (here and (never or too_few)):
            self._waited = now
        elif now - self._waited >= PROGRESS_S:
            self._waited = now
            if too_few:
                few = f"{counted(len(here), 'worker')} here, and --min-workers is {self._least}"
                self._tell(f"{few}: nothing is updated until more come")
            else:
                told = ", ".join(map(str, never[:8])) + (", …" if len(never) > 8 else "")
                one = len(never) == 1
                self._tell(
                    f"waiting for worker{'' if one else 's'} {told}, which {'has' if one else 'have'} not come yet"
                )

    @property
    def _unit(self) -> str:
        return "step" if self._core.steps_each == 1 else "exchange"

    def summary(self, received: int, sent: int) -> str:
        """Returns the training's sums in one line."""
        if self._began is None:
            return "no worker has joined"
        done = counted(self._core.step - self._first, self._unit)
        seconds = self._now() - self._began
        return f"{done} with {counted(len(self._seen), 'worker')} in {seconds:.1f} s, {_traffic(received, sent)}"


def _traffic(received: int, sent: int) -> str:
    return f"received {nbytes_text(received)}, sent {nbytes_text(sent)}"
