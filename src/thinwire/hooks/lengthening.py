"""Updates as long as if workers had divided by the second moment of the gradient that all of them have together.

Adam divides by the root of the mean square of a gradient. A worker sees its own, in which chance weighs more than in
the mean of all workers' gradients, by which plain data-parallel training divides: so its update is shorter, by another
factor in every tensor, and one training with a higher rate instead of that diverges where a gradient is mostly signal.

How much shorter, the squared norms of both gradients say. That of the mean is found without sending it: every worker
adds up its gradient's values in a few sums, with signs that all have drawn alike, and the mean of these sums over the
workers is the mean gradient's sums, whose squares add up to its squared norm in expectation (Alon, Matias and Szegedy
1996). McCandlish et al. (2018, appendix A) take the same two norms to measure how large batches may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thinwire.hooks.several import parts
from thinwire.hooks.steering import KINDS, decay_of
from thinwire.worker.model import WorkerTensor

NAME = "thinwire..gradients"
"""What the table with all sums is called. A tensor's name is a path, and no module is called by an empty text."""
HOST: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""Of what is added up, whatever torch makes tensors of and where by default."""
SUMS = 16
"""Of every tensor; and its squared norm. Over 20 steps that are remembered, the mean gradient's norm is 3 % off where
values are independent, 7 % where a matrix has rank one, 11 % where its columns are equal: rows of so many values share
a sign. As a factor is at least 1, it is then 4 and 6 % too long on average where it should be 1, and 1 % otherwise."""


class Lengthening:
    """Lengthens what a worker's own optimizer has changed, before it is pushed.

    Args:
        optimizer: the worker's own; those of its parts that are one of `KINDS` are lengthened.
        workers: how many train together at first.
        seed: the same on all workers, of the signs.

    Attributes:
        workers: how many train together now; to be set where they come and go.
        board: float32[parameters, SUMS + 1]; what this worker's gradients add up to, and after an exchange the mean.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, workers: int, seed: int) -> None:
        # Groups by their numbers: an optimizer that loads a state makes new ones.
        self._members = [
            (parameter, each, number)
            for each in parts(optimizer)
            if type(each) in KINDS
            for number, group in enumerate(each.param_groups)
            for parameter in group["params"]
        ]
        self.board = torch.zeros(len(self._members), SUMS + 1, **HOST)
        self.workers, self._seed = workers, seed
        # Squared, running means: of the mean gradient, and of each.
        self._norms = torch.zeros(2, len(self._members), **HOST)
        self._told = False
        self._shared: dict[int, WorkerTensor] = {}

    @property
    def lengthens(self) -> bool:
        """Whether there is anything to lengthen: one worker alone changes nothing, but others may come."""
        return bool(self._members)

    def follow(self, tensors: Sequence[WorkerTensor]) -> None:
        """Takes the worker's tensors, whose shared values local steps began from."""
        self._shared = {id(tensor.parameter): tensor for tensor in tensors}

    def factors(self) -> torch.Tensor:
        """Returns by how much each parameter's update is to be longer: 1 to the root of the number of workers."""
        of_mean, of_each = self._norms
        share = torch.where(of_each > 0, of_mean / of_each, 1.0)
        return share.clamp(1 / self.workers, 1.0).rsqrt()

    def stepped(self, clock: int) -> None:
        """Lengthens what the step has changed, and notes its gradients for the exchange that follows.

        Args:
            clock: that exchange's number, which all workers have alike, those that joined late too.
        """
        self._take()
        for (parameter, optimizer, number), factor in zip(self._members, self.factors().tolist(), strict=True):
            if parameter.grad is None or factor == 1.0:  # without a gradient it has not changed, by decay neither
                continue
            if (began := self._began(parameter)) is not None:
                own = parameter.detach()
                # Decay has nothing to do with what chance is in gradients: it stays as long as it is.
                if decay := decay_of(optimizer, optimizer.param_groups[number]):
                    began = began * (1 - decay)
                if own.dtype == torch.float32:
                    own.lerp_(began, 1 - factor)
                else:
                    own.copy_(own.float().lerp_(began, 1 - factor))
        self.board.copy_(self._sums(clock))
        self._told = True

    def _began(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What a parameter was before the step, float32: where its own dtype rounded that, no step has changed it."""
        if (tensor := self._shared.get(id(parameter))) is None:
            return None
        held_back = tensor.held_back()
        return (tensor.values if held_back is None else tensor.values - held_back).view(parameter.shape)

    def _gradient(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor | None:
        """What Adam has divided by the root of its mean square: the gradient, and decay that is not decoupled."""
        gradient, group = parameter.grad, optimizer.param_groups[number]
        decay = 0.0 if decay_of(optimizer, group) else float(group["weight_decay"])
        if gradient is None or not decay or (began := self._began(parameter)) is None:
            return gradient
        return gradient.detach().float().add(began, alpha=-decay if group["maximize"] else decay)

    def skipped(self) -> None:
        """No step was taken, as a GradScaler found an overflow here: takes what all have told, and tells nothing.

        In the mean that comes this worker's gradients count as zeros, which all workers see alike.
        """
        self._take()
        self.board.zero_()
        self._told = True

    def _take(self) -> None:
        """Takes the means of what all workers have told; gradients that were not finite say nothing."""
        if not self._told:
            return
        told = torch.stack([self.board[:, :SUMS].square().sum(1), self.board[:, SUMS]])
        groups = [optimizer.param_groups[number] for _, optimizer, number in self._members]
        second = torch.tensor([float(group["betas"][1]) for group in groups], **HOST)
        self._norms = torch.where(told[1] > 0, self._norms.lerp(told, 1 - second), self._norms)
        self._told = False

    def _sums(self, clock: int) -> torch.Tensor:
        numels = [0 if parameter.grad is None else parameter.numel() for parameter, *_ in self._members]
        rows = [-(-numel // SUMS) for numel in numels]
        generator = torch.Generator("cpu").manual_seed(((self._seed << 32) + clock) % (1 << 63))
        drawn = torch.randint(0, 2, (max(rows, default=0),), generator=generator, dtype=torch.int8, device="cpu")
        signs, found = {torch.device("cpu"): drawn.float().mul_(2).sub_(1)}, []
        for member, count in zip(self._members, rows, strict=True):
            if (gradient := self._gradient(*member)) is None or not count:
                found.append(torch.zeros(SUMS + 1, **HOST))
                continue
            flat = gradient.detach().reshape(-1).float()
            ours = signs.setdefault(flat.device, signs[torch.device("cpu")].to(flat.device))
            whole = flat.numel() // SUMS
            sums = ours[:whole] @ flat[: whole * SUMS].view(whole, SUMS)
            rest = flat[whole * SUMS :]
            sums[: rest.numel()] += ours[count - 1] * rest
            found.append(torch.cat([sums, flat.dot(flat).view(1)]))
        told = torch.stack([each.cpu() for each in found]) if found else self.board
        return told if bool(told.isfinite().all()) else torch.zeros_like(told)

    def state_dict(self) -> dict[str, Any]:
        """Returns the running means, and what was told last."""
        return {"norms": self._norms.clone(), "told": self._told, "board": self.board.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._norms, self._told = state["norms"].clone(), bool(state["told"])
        self.board.copy_(state["board"])
        if (shared := self._shared.get(id(self.board))) is not None:
            shared.read()
