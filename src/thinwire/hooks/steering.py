"""What all workers did, in each one's momentum: between exchanges, workers that only know their own data drift apart.

An update of the shared parameters is the mean of what all workers changed in the last H steps. Divided by the rates of
these steps it is the direction in which their optimizers went on average, and times the root of a worker's own second
moment a first moment that would have led there. A share of each worker's own is replaced by that: nothing more travels.
(Momenta from what everybody did: FedCM, Xu et al. 2021, for SGD with gradients; Mime, Karimireddy et al. 2020.)

What decoupled weight decay has taken goes off first. No gradient led there, every optimizer takes it by itself at each
step, and a momentum that held it would take it again and again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from thinwire.worker.model import WorkerTensor
from thinwire.worker.rows import Lead

KINDS: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.Adam, torch.optim.AdamW)
"""Whose first moments are known; others go unsteered."""


def decay_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """Returns by which share of themselves one step of a group shrinks its parameters, beside what gradients do.

    Args:
        optimizer: one of `KINDS`.
        group: of its parameters. Adam's decay is a part of the gradient, unless the group has it decoupled.
    """
    if not (isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)):
        return 0.0
    return float(group["lr"]) * float(group["weight_decay"])


class Steering:
    """Replaces a share of an optimizer's first moments at every update.

    Args:
        optimizer: the worker's own, one of `KINDS`.
        share: of the moments that is replaced, above 0 and below 1.
        outer_groups: of the outer optimizer, which multiplied the mean by its rate.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, share: float, outer_groups: Sequence[Mapping[str, Any]]
    ) -> None:
        self._optimizer, self._share, self._outer = optimizer, share, outer_groups
        # Of every parameter group: rates of the steps since the last push, and of those that it had; and their decay.
        self._rates = [0.0] * len(optimizer.param_groups)
        self._pushed = [0.0] * len(optimizer.param_groups)
        self._decays = [0.0] * len(optimizer.param_groups)
        self._pushed_decays = [0.0] * len(optimizer.param_groups)
        self._outer_lr = 0.0  # of what has been pushed: it may be another when the answer comes

    def stepped(self) -> None:
        """The optimizer has taken a step, with the rates that its groups have now."""
        for index, group in enumerate(self._optimizer.param_groups):
            self._rates[index] += float(group["lr"])
            self._decays[index] += decay_of(self._optimizer, group)

    def pushed(self) -> None:
        """What was changed in the steps so far has been pushed."""
        self._pushed, self._rates = self._rates, [0.0] * len(self._rates)
        self._pushed_decays, self._decays = self._decays, [0.0] * len(self._decays)
        self._outer_lr = float(self._outer[0]["lr"])

    def leads(self, tensors: Sequence[WorkerTensor]) -> list[Lead | None] | None:
        """Returns what leads the first moments of some parameters at the update that comes next.

        Args:
            tensors: parameters, and buffers, which have no moments.

        Returns:
            Of each tensor; None of all where one's moments are not plain float32 in the host's memory.
        """
        found: list[Lead | None] = [None] * len(tensors)
        for group, rates, decay in self._groups():
            first, second = (float(beta) for beta in group["betas"])
            squares = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
            for place, state in self._moments(group, tensors):
                moments, step = (state["exp_avg"], state[squares]), float(state["step"])
                if not all(each.is_cpu and each.dtype == torch.float32 and each.is_contiguous() for each in moments):
                    return None
                # Adam divides by √(v / (1 − β₂ᵗ)) + ε, and its first moment by 1 − β₁ᵗ.
                correction, factor = 1 / math.sqrt(1 - second**step), (1 - first**step) / rates
                found[place] = Lead(*moments, correction, float(group["eps"]), factor, decay)
        return found

    def updated(self, tensors: Sequence[WorkerTensor], before: Sequence[torch.Tensor]) -> None:
        """Replaces a share of the first moments of some parameters, whose shared values have changed.

        Args:
            tensors: parameters, and buffers, which have no moments.
            before: their shared values before, float32[n] each.
        """
        for group, rates, decay in self._groups():
            some = list(self._moments(group, tensors))
            if not some:
                continue
            first, second = (float(beta) for beta in group["betas"])
            squares = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
            steps = [float(state["step"]) for _, state in some]
            moments = torch._foreach_sqrt([state[squares].float() for _, state in some])
            torch._foreach_mul_(moments, [1 / math.sqrt(1 - second**step) for step in steps])
            torch._foreach_add_(moments, float(group["eps"]))
            changes = [before[place].sub_(tensors[place].values).view(tensors[place].shown.shape) for place, _ in some]
            if decay:
                now = [tensors[place].values.view_as(each) for (place, _), each in zip(some, changes, strict=True)]
                torch._foreach_add_(changes, now, alpha=-decay)
            torch._foreach_mul_(moments, changes)
            torch._foreach_mul_(moments, [(1 - first**step) / rates for step in steps])
            own = [state["exp_avg"] for _, state in some]
            torch._foreach_lerp_(own, [m.to(o.dtype) for m, o in zip(moments, own, strict=True)], self._share)

    def _groups(self) -> Iterator[tuple[Mapping[str, Any], float, float]]:
        """Yields the parameter groups with rates and decay of the steps whose update comes, times the outer rate."""
        groups = zip(self._optimizer.param_groups, self._pushed, self._pushed_decays, strict=True)
        for group, pushed, decay in groups:
            if (rates := self._outer_lr * pushed) > 0:
                yield group, rates, self._outer_lr * decay

    def _moments(
        self, group: Mapping[str, Any], tensors: Sequence[WorkerTensor]
    ) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yields the places of a group's parameters, and their states: one without gradients has no moments."""
        members, kept = set(group["params"]), self._optimizer.state
        for place, tensor in enumerate(tensors):
            if tensor.parameter in members and "exp_avg" in (state := kept.get(tensor.parameter, {})):
                yield place, state

    def state_dict(self) -> dict[str, list[float]]:
        """Returns the rates and the decay of steps whose update has not come."""
        return {
            "rates": list(self._rates),
            "pushed": list(self._pushed),
            "decays": list(self._decays),
            "pushed_decays": list(self._pushed_decays),
            "outer": [self._outer_lr],
        }

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restores what `state_dict` returned."""
        self._rates, self._pushed = list(state["rates"]), list(state["pushed"])
        # States did not have these once.
        [self._outer_lr] = state.get("outer", [float(self._outer[0]["lr"])])
        nothing = [0.0] * len(self._rates)
        self._decays = list(state.get("decays", nothing))
        self._pushed_decays = list(state.get("pushed_decays", nothing))
