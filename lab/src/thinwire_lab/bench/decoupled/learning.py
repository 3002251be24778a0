"""A learner's training, by any clock: its model, its batches, and one inner step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

import thinwire as tw
from thinwire.hooks.decoupled_optimizer import DecoupledOptimizer
from thinwire.transports.base import Connection
from thinwire_lab.workloads.evaluate import evaluate
from thinwire_lab.workloads.recipe import Recipe, for_workers, schedule
from thinwire_lab.workloads.recipes import recipe
from thinwire_lab.workloads.training import Training, training

ALONE = "alone"
"""Replaces a design: these learners exchange nothing."""
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
