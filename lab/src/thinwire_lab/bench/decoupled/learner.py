"""One learner as a process: it keeps its pace, and reports the seconds of every inner step.

The learner pads the computing of an inner step, from the batch to its own optimizer, to the pace: several learners fit
few processors. Exchanges, and waits in the forward pass, take additional seconds.
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
from thinwire_lab.bench.cells import WARM, Gates, Rank, Warm
from thinwire_lab.bench.decoupled.learning import ALONE, Learning, take_step
from thinwire_lab.jobs.training import warm_up


class LearnerRank(Rank, frozen=True, kw_only=True):
    """One learner. It trains for a number of seconds, or for a number of inner steps if workers exchange in step."""

    learning: Learning
    seconds: float
    steps: int | None = None


class Inner(Event, frozen=True, kw_only=True):
    """A learner has taken an inner step.

    Attributes:
        at_s: seconds since the start of all learners.
        computing_s: seconds from the batch to the learner's own optimizer, without the padding.
        stall_s: seconds of exchanges and waits, beyond the pace and the computing.
        loss: loss of its batch.
    """

    at_s: float
    computing_s: float
    stall_s: float
    loss: float


class Learned(Event, frozen=True, kw_only=True):
    """A learner has ended.

    Attributes:
        loss: loss of the shared parameters; the learner of rank 0 alone reports it.
        merged: bytes of all learners' text in the shared parameters; None if workers exchange in step.
    """

    loss: float | None = None
    merged: float | None = None


def play(role: LearnerRank) -> None:
    """Trains as one learner, and reports on standard output."""
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
        _report(Warm())
        Gates(role.gate).wait(WARM)
        pace = _Pace(learning.pace_of(rank), opt, (Path(role.gate) / WARM).stat().st_mtime)
        made.optimizer.register_step_post_hook(pace.keep)
        while (progress := pace.progress(role)) < 1:
            pace.begin()
            loss = take_step(made, opt, progress)
            _report(pace.end(loss))
        if learning.design != ALONE:
            opt.flush()
        merged = opt.examples_merged if isinstance(opt, DecoupledOptimizer) else None
        _report(Learned(loss=learning.score(made) if rank == 0 else None, merged=merged))


class _Pace:
    """The pace of one learner, in seconds since the start of all learners."""

    def __init__(self, pace_s: float, opt: Any, began: float) -> None:
        self._pace_s, self._opt, self._all_began = pace_s, opt, began
        self._began = self._exchanged = self._computing_s = 0.0

    def progress(self, role: LearnerRank) -> float:
        """Returns the completed share of the training."""
        if role.steps is not None:
            return float(self._opt.steps_done) / role.steps
        return (time.time() - self._all_began) / role.seconds

    def begin(self) -> None:
        """Begins an inner step."""
        self._began, self._exchanged = time.perf_counter(), self._exchange_s()

    def keep(self, *_: Any) -> None:
        """Sleeps until the pace is kept: after the step of the learner's own optimizer, before any exchange."""
        self._computing_s = time.perf_counter() - self._began - (self._exchange_s() - self._exchanged)
        time.sleep(max(0.0, self._pace_s - self._computing_s))

    def end(self, loss: float) -> Inner:
        """Ends the inner step; returns its report."""
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
    """Returns the command of this learner's process."""
    return [sys.executable, "-P", "-m", __name__, msgspec.json.encode(role).decode()]


def _report(event: Event) -> None:
    print(event.line(), flush=True)


if __name__ == "__main__":
    play(msgspec.json.decode(sys.argv[1], type=LearnerRank))
