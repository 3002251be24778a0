"""What `thinwire server` tells a person: who joins and goes, how far the training is, and what it came to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from thinwire.quantities import counted, moment_text, nbytes_text
from thinwire.runtime.clock import MOMENT_S

PROGRESS_S = 10.0
"""Between two lines on how far the training is."""


class Served(Protocol):
    """What is looked at of a shard, see `ServerCore`."""

    @property
    def here(self) -> tuple[int, ...]: ...

    @property
    def interrupted_ranks(self) -> tuple[int, ...]: ...

    @property
    def left(self) -> tuple[int, ...]: ...

    @property
    def step(self) -> int: ...

    @property
    def steps_each(self) -> int: ...

    @property
    def missing(self) -> tuple[int, ...]: ...


class ServingProgress:
    """Looks at a shard from time to time, and says what has changed.

    It reads values that the server's thread changes, and changes none.

    Args:
        core: the shard.
        tell: takes a line.
        now: a time in seconds.
        grace_s: how long a worker whose connection broke is waited for, in seconds.
        min_workers: below so many nothing is updated; None where all are needed anyway.
    """

    def __init__(
        self,
        core: Served,
        tell: Callable[[str], None],
        now: Callable[[], float],
        grace_s: float = 0.0,
        min_workers: int | None = None,
    ) -> None:
        self._core, self._tell, self._now, self._grace_s = core, tell, now, grace_s
        self._least = min_workers or 0
        self._broken: dict[int, float] = {}
        self._told_broken: set[int] = set()
        self._here: set[int] = set()
        self._seen: set[int] = set()
        self._began: float | None = None
        self._first = self._step = self._looked = core.step
        self._told = self._waited = now()

    def look(self, received: int, sent: int) -> None:
        """Tells who has come and gone since the last look, and every ten seconds how far the training is.

        Args:
            received, sent: bytes of the whole training so far.
        """
        here, step = set(self._core.here), self._core.step
        for rank in sorted(here - self._here):
            # A look may come many steps after the first one: only who was not there at a later one came so late.
            again, at = (
                " again" if rank in self._seen else "",
                f" at {self._moment(step)}" if self._looked > self._first else "",
            )
            self._tell(f"worker {rank} joined{again}{at}; {len(here)} here")
        for rank in sorted(self._here - here):
            how = "has reached the end" if rank in self._core.left else "is gone"
            self._tell(f"worker {rank} {how} at {self._moment(step)}; {len(here)} here")
        for rank in sorted(set(self._core.left) - here - self._seen):  # between two looks: nothing was left to do
            self._tell(f"worker {rank} joined, and has reached the end at {self._moment(step)}; {len(here)} here")
        self._tell_who_is_cut_off(here, step)
        self._looked = step
        self._seen |= here | set(self._core.left)
        self._here = here
        if self._seen and self._began is None:
            self._began = self._told = self._now()
        if (waited := self._now() - self._told) >= PROGRESS_S and step > self._step:
            rate = (step - self._step) / waited
            self._tell(f"{self._moment(step)}  {rate:.1f} {self._unit}s/s  {_traffic(received, sent)}")
            self._told, self._step = self._now(), step
        self._tell_who_is_missing(here)

    def _tell_who_is_cut_off(self, here: set[int], step: int) -> None:
        """Once of each break that is longer than a moment, and once of its end where the worker is back."""
        broken, now = set(self._core.interrupted_ranks), self._now()
        for rank in sorted(self._told_broken - broken):
            self._told_broken.discard(rank)
            if rank in here:
                self._tell(f"worker {rank} is connected again at {self._moment(step)}")
        self._broken = {rank: self._broken.get(rank, now) for rank in broken}
        for rank in sorted(broken - self._told_broken):
            if now - self._broken[rank] >= MOMENT_S:
                self._told_broken.add(rank)
                at = self._moment(step)
                self._tell(f"worker {rank} lost its connection at {at}; waited for, {self._grace_s:g} s at most")

    def _tell_who_is_missing(self, here: set[int]) -> None:
        """Every ten seconds in which workers are here, and others have never come, or too few are here."""
        never = sorted(set(self._core.missing) - here - self._seen)
        too_few = len(here | set(self._core.left)) < self._least
        if not (here and (never or too_few)):
            self._waited = self._now()
        elif self._now() - self._waited >= PROGRESS_S:
            self._waited = self._now()
            if too_few:
                self._tell(
                    f"{counted(len(here), 'worker')} here, and --min-workers is {self._least}: nothing is updated "
                    "until more come"
                )
                return
            told = ", ".join(map(str, never[:8])) + (", …" if len(never) > 8 else "")
            self._tell(
                f"waiting for worker{'s' * (len(never) > 1)} {told}, which {'has' if len(never) == 1 else 'have'} "
                "not come yet"
            )

    def _moment(self, step: int) -> str:
        return moment_text(step, self._core.steps_each)

    @property
    def _unit(self) -> str:
        return "step" if self._core.steps_each == 1 else "exchange"

    def summary(self, received: int, sent: int) -> str:
        """Returns what the training came to, in one line."""
        if self._began is None:
            return "no worker has joined"
        done = counted(self._core.step - self._first, self._unit)
        seconds = self._now() - self._began
        return f"{done} with {counted(len(self._seen), 'worker')} in {seconds:.1f} s, {_traffic(received, sent)}"


def _traffic(received: int, sent: int) -> str:
    return f"received {nbytes_text(received)}, sent {nbytes_text(sent)}"
