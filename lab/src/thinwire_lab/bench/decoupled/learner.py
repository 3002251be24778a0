"""One learner as a process: it keeps its pace, and reports the seconds of every inner step.

The computing of an inner step, from the batch to the learner's own optimizer, is padded to the pace: several learners
fit few processors. Seconds of exchanges come on top, waits in the forward pass too.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from thinwire.engines.events import Event
from thinwire.hooks.decoupled_optimizer import DecoupledOptimizer
from thinwire.policies.designs import design
from thinwire_lab.bench.decoupled.learning import ALONE, Learning, take_step
from thinwire_lab.bench.roles import WARM, Gates, Rank, Warm
from thinwire_lab.jobs.training import warm_up


class LearnerRank(Rank, frozen=True, kw_only=True):
    """One learner, which trains for so many seconds, or where workers exchange in step, for so many inner steps."""

    learning: Learning
    seconds: float
    steps: int | None = None


class Inner(Event, frozen=True, kw_only=True):
    """A learner has taken an inner step.

    Attributes:
        at_s: seconds since all learners began.
        computing_s: from the batch to the learner's own optimizer, before it was padded.
        stall_s: exchanges and waits, beyond the pace and the computing.
        loss: of its batch.
    """

    at_s: float
    computing_s: float
    stall_s: float
    loss: float


class Learned(Event, frozen=True, kw_only=True):
    """A learner has ended.

    Attributes:
        loss: of the shared parameters, by the learner of rank 0.
        merged: bytes of text that the shared parameters hold, of all learners; None where workers exchange in step.
    """

    loss: float | None = None
    merged: float | None = None


def play(role: LearnerRank) -> None:
    """Trains, and reports on standard output."""
    learning, rank = role.learning, role.rank
    made = learning.training(rank)
    if learning.design != ALONE:
        chosen = design(learning.design)
        warm_up(chosen.up)
        warm_up(chosen.down)
    made.copy().backward()  # the first one loads and compiles
    with learning.join(made, rank, role.server or "") as opt:
        if learning.design != ALONE:
            opt.sync()
        _say(Warm())
        Gates(role.gate).wait(WARM)
        pace = _Pace(learning.pace_of(rank), opt, (Path(role.gate) / WARM).stat().st_mtime)
        made.optimizer.register_step_post_hook(pace.keep)
        while (progress := pace.progress(role)) < 1:
            pace.begin()
            loss = take_step(made, opt, progress)
            _say(pace.end(loss))
        if learning.design != ALONE:
            opt.flush()
        merged = opt.examples_merged if isinstance(opt, DecoupledOptimizer) else None
        _say(Learned(loss=learning.score(made) if rank == 0 else None, merged=merged))


class _Pace:
    """The pace of one learner, in seconds, since the time at which all began."""

    def __init__(self, pace_s: float, opt: Any, began: float) -> None:
        self._pace_s, self._opt, self._all_began = pace_s, opt, began
        self._began = self._exchanged = self._computing_s = 0.0

    def progress(self, role: LearnerRank) -> float:
        """Returns which share of its training is over."""
        if role.steps is not None:
            return float(self._opt.steps_done) / role.steps
        return (time.time() - self._all_began) / role.seconds

    def begin(self) -> None:
        """An inner step begins."""
        self._began, self._exchanged = time.perf_counter(), self._exchange_s()

    def keep(self, *_: Any) -> None:
        """The learner's own optimizer has stepped, and nothing is exchanged yet: waits until the pace is kept."""
        self._computing_s = time.perf_counter() - self._began - (self._exchange_s() - self._exchanged)
        time.sleep(max(0.0, self._pace_s - self._computing_s))

    def end(self, loss: float) -> Inner:
        """The step is over; returns what to report."""
        took_s = time.perf_counter() - self._began
        return Inner(
            at_s=time.time() - self._all_began,
            computing_s=self._computing_s,
            stall_s=max(0.0, took_s - max(self._pace_s, self._computing_s)),
            loss=loss,
        )

    def _exchange_s(self) -> float:
        traffic = getattr(self._opt, "traffic", None)
        return 0.0 if traffic is None else float(traffic().get("exchange_seconds", 0.0))


def command(role: LearnerRank) -> list[str]:
    """Returns the command of a process that is this learner."""
    return [sys.executable, "-P", "-m", __name__, msgspec.json.encode(role).decode()]


def _say(event: Event) -> None:
    print(event.line(), flush=True)


if __name__ == "__main__":
    play(msgspec.json.decode(sys.argv[1], type=LearnerRank))
