"""The values that several workers would send of one tensor, and their answer, made from one worker's gradients.

A worker's gradients of different steps stand in for different workers' of one step. Local updates are what a worker's
own optimizer makes of some gradients; an answer is the mean of the pushes, or what a server's optimizer makes of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from thinwire.planner.optimizers import Trainer
from thinwire.policies.designs import Design
from thinwire.policies.local_updates import LocalUpdates

INNER_STEPS = 2
"""Of local updates, at most: with four, frames had the same length within 4 %, and a plan took twice as long."""

Stepping = Callable[[torch.Tensor], torch.Tensor]


class Senders:
    """The workers of one tensor, and their server.

    Args:
        name: of the tensor.
        gradients: of a worker's steps, in order; they repeat.
        design: how the workers train.
        trainer: the training's own optimizer.
        workers: how many stand for all.
        collective: ranks average, and all of them step by the mean.
    """

    def __init__(
        self,
        name: str,
        gradients: Sequence[torch.Tensor],
        design: Design,
        trainer: Trainer,
        *,
        workers: int,
        collective: bool,
    ) -> None:
        local, like = design.local, gradients[0]
        self._inner = 1 if local is None else min(local.h, INNER_STEPS)
        self._gradients = itertools.cycle(gradients)

        def trained() -> Stepping:
            parameter = torch.zeros_like(like)
            return _stepping(parameter, trainer.optimizer(name, parameter))

        # A step of plain SGD, which a design may demand, is the gradient; no codec sees how large values are.
        steps = local is not None and local.inner == "any"
        self._workers = [trained() if steps else _unchanged for _ in range(workers)]
        if local is not None:
            self._answer = _outer(torch.zeros_like(like), local)
        else:
            self._answer = _unchanged if collective or design.downlink != "delta" else trained()

    def pushed(self) -> list[torch.Tensor]:
        """Returns what each worker sends next."""
        return [
            functools.reduce(torch.add, [step(next(self._gradients)) for _ in range(self._inner)])
            for step in self._workers
        ]

    def pulled(self, mean: torch.Tensor) -> torch.Tensor:
        """Returns the answer to all, where this is the mean of the decoded pushes."""
        return self._answer(mean)


def _unchanged(gradient: torch.Tensor) -> torch.Tensor:
    return gradient


def _stepping(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> Stepping:
    """Returns what says of each gradient by how much the optimizer changes the parameter."""

    def step(gradient: torch.Tensor) -> torch.Tensor:
        before = parameter.clone()
        parameter.grad = gradient
        optimizer.step()
        changed = before - parameter
        return changed if bool(changed.isfinite().all()) else gradient  # as with an eps of 0

    return step


def _outer(parameter: torch.Tensor, updates: LocalUpdates) -> Stepping:
    if updates.outer == "SignSGD":
        return torch.sign
    if not updates.outer_momentum:
        return _unchanged
    momentum, nesterov = updates.outer_momentum, updates.nesterov
    return _stepping(parameter, torch.optim.SGD([parameter], lr=1.0, momentum=momentum, nesterov=nesterov))
