"""A learner's training, by any clock; and one learner as a process, which reports the seconds of every inner step.

The process pads the computing of an inner step, from the batch to the learner's own optimizer, to the pace: several
learners fit few processors. Exchanges, and waits in the forward pass, take additional seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from thinwire.engines.events import Event
from thinwire.hooks.decoupled_optimizer import DecoupledOptimizer
from thinwire.policies.designs import design
from thinwire.transports.base import Connection
from thinwire_lab.bench.cells import WARM, Gates, Rank, Warm
from thinwire_lab.bench.options import ALONE
from thinwire_lab.jobs.training import warm_up
from thinwire_lab.workloads.evaluate import evaluate
from thinwire_lab.workloads.recipe import Recipe, for_workers, schedule
from thinwire_lab.workloads.recipes import recipe
from thinwire_lab.workloads.training import Training, training

DATA = "python-text"


@dataclass(frozen=True, kw_only=True)
class Learning:
    """The training of all learners.

    Args:
        design: design of the exchanges, or `ALONE`.
        model, lr, seed: options of the training; without a rate it takes the recipe's.
        speeds: the learners' speeds; a learner of speed 1 takes an inner step in `pace_s`.
        pace_s: seconds of such a step.
        eval_examples: number of windows of the test text in a score.
    """

    design: str
    model: str = "byte-transformer-1m"
    lr: float | None = None
    seed: int = 0
    speeds: Sequence[float] = (1.0, 1.0, 1.0, 1.0)
    pace_s: float = 0.3
    eval_examples: int = 512

    def pace_of(self, rank: int) -> float:
        """Returns the seconds of a learner's inner step."""
        return self.pace_s / self.speeds[rank]

    def recipe(self) -> Recipe:
        """Returns the recipe for this number of learners."""
        found = for_workers(recipe(self.model, DATA), len(self.speeds))
        return replace(found, lr=self.lr or found.lr)

    def training(self, rank: int) -> Training:
        """Returns one learner's model, optimizer and batches."""
        torch.set_num_threads(1)
        return training(self.recipe(), data=DATA, rank=rank, workers=len(self.speeds), seed=self.seed)

    def join(self, made: Training, rank: int, server: str | Connection) -> Any:
        """Returns the optimizer that exchanges the learner's changes; for `ALONE`, the learner's own optimizer."""
        if self.design == ALONE:
            return nullcontext(made.optimizer)
        common: dict[str, Any] = {"rank": rank, "workers": len(self.speeds), "seed": self.seed}
        return tw.distribute(made.model, made.optimizer, server=server, design=self.design, **common)

    def score(self, made: Training) -> float:
        """Returns the loss on the test text, in nats a byte, from windows at equal distances."""
        count = len(made.dataset.test_x)
        rows = torch.arange(min(self.eval_examples, count)) * count // min(self.eval_examples, count)
        few = replace(made.dataset, test_x=made.dataset.test_x[rows], test_y=made.dataset.test_y[rows])
        return evaluate(made.model, few).loss


def take_step(made: Training, opt: Any, progress: float) -> float:
    """Takes one inner step at this share of the training, 0 … 1; returns its loss. Decoupled optimizers count bytes."""
    for group in opt.param_groups:
        group["lr"] = schedule(made.recipe, progress)
    opt.zero_grad()
    inputs, targets = next(made.batches)
    loss = made.backward((inputs, targets))
    if isinstance(opt, DecoupledOptimizer):
        opt.step(examples=targets.numel())
    else:
        opt.step()
    return float(loss)


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


def play(role: LearnerRank, report: Callable[[Event], None]) -> None:
    """Trains as one learner."""
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
        report(Warm())
        Gates(role.gate).wait(WARM)
        pace = _Pace(learning.pace_of(rank), opt, (Path(role.gate) / WARM).stat().st_mtime)
        made.optimizer.register_step_post_hook(pace.keep)
        while (progress := pace.progress(role)) < 1:
            pace.begin()
            report(pace.end(take_step(made, opt, progress)))
        if learning.design != ALONE:
            opt.flush()
        merged = opt.examples_merged if isinstance(opt, DecoupledOptimizer) else None
        report(Learned(loss=learning.score(made) if rank == 0 else None, merged=merged))


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
