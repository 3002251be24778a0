"""What all workers did, in each one's momentum: between exchanges, workers that only know their own data drift apart.

An update of the shared parameters is the mean of what all workers changed in the last H steps. Divided by the rates of
these steps it is the direction in which their optimizers went on average, and times the root of a worker's own second
moment a first moment that would have led there. A share of each worker's own is replaced by that: nothing more travels.
(Momenta from what everybody did: FedCM, Xu et al. 2021, for SGD with gradients; Mime, Karimireddy et al. 2020.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thinwire.kernels.numba.local_steps import lead
from thinwire.worker.model import WorkerTensor

KINDS: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.Adam, torch.optim.AdamW)
"""Whose first moments are known; others go unsteered."""


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
        self._group_of = {
            parameter: index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        # Of every parameter group: rates of the steps since the last push, and of those that it had.
        self._rates = [0.0] * len(optimizer.param_groups)
        self._pushed = [0.0] * len(optimizer.param_groups)
        self._room = torch.empty(0)

    def stepped(self) -> None:
        """The optimizer has taken a step, with the rates that its groups have now."""
        for index, group in enumerate(self._optimizer.param_groups):
            self._rates[index] += float(group["lr"])

    def pushed(self) -> None:
        """What was changed in the steps so far has been pushed."""
        self._pushed, self._rates = self._rates, [0.0] * len(self._rates)

    def updated(self, tensors: Sequence[WorkerTensor], before: Sequence[torch.Tensor]) -> None:
        """Replaces a share of the first moments of some parameters, whose shared values have changed.

        Args:
            tensors: parameters, and buffers, which have no moments.
            before: their shared values before, float32[n] each.
        """
        outer_lr, kept = float(self._outer[0]["lr"]), self._optimizer.state
        for index, group in enumerate(self._optimizer.param_groups):
            rates = outer_lr * self._pushed[index]
            of_group = [
                (tensor, was.view(tensor.shown.shape), kept[tensor.parameter])
                for tensor, was in zip(tensors, before, strict=True)
                if self._group_of.get(tensor.parameter) == index
                and "exp_avg" in kept.get(tensor.parameter, {})  # which a parameter without gradients has not
            ]
            if not of_group or not rates > 0:
                continue
            first, second = (float(beta) for beta in group["betas"])
            squares = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
            steps = [float(state["step"]) for _, _, state in of_group]
            # Adam divides by √(v / (1 − β₂ᵗ)) + ε, and its first moment by 1 − β₁ᵗ.
            moments = self._leading(
                [was for _, was, _ in of_group],
                [tensor.values.view(was.shape) for tensor, was, _ in of_group],
                [state[squares] for _, _, state in of_group],
                [1 / math.sqrt(1 - second**step) for step in steps],
                float(group["eps"]),
                [(1 - first**step) / rates for step in steps],
            )
            own = [state["exp_avg"] for _, _, state in of_group]
            torch._foreach_lerp_(own, [m.to(o.dtype) for m, o in zip(moments, own, strict=True)], self._share)

    def _leading(
        self,
        before: Sequence[torch.Tensor],
        shared: Sequence[torch.Tensor],
        squares: Sequence[torch.Tensor],
        corrections: Sequence[float],
        eps: float,
        factors: Sequence[float],
    ) -> Sequence[torch.Tensor]:
        """Returns ``(sqrt(squares) * correction + eps) * (before - shared) * factor``, float32; overwrites `before`.

        In the host's memory one pass does it, and the bits are those of torch's operations. Roots are torch's own in
        any case: the library that it has them from need not round all of them correctly.
        """
        if all(each.is_cpu and each.dtype == torch.float32 and each.is_contiguous() for each in squares):
            most = max(each.numel() for each in squares)
            if self._room.numel() < most:
                self._room = torch.empty(most)  # of one tensor, so that it stays near the processor
            for was, now, square, *scalars in zip(before, shared, squares, corrections, factors, strict=True):
                roots = torch.sqrt(square.view(-1), out=self._room[: square.numel()])
                lead(was.view(-1).numpy(), now.view(-1).numpy(), roots.numpy(), scalars[0], eps, scalars[1])
            return before
        moments = torch._foreach_sqrt([each.float() for each in squares])
        torch._foreach_mul_(moments, corrections)
        torch._foreach_add_(moments, eps)
        torch._foreach_mul_(moments, [was.sub_(now) for was, now in zip(before, shared, strict=True)])
        torch._foreach_mul_(moments, factors)
        return moments

    def state_dict(self) -> dict[str, list[float]]:
        """Returns the rates of steps whose update has not come."""
        return {"rates": list(self._rates), "pushed": list(self._pushed)}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restores what `state_dict` returned."""
        self._rates, self._pushed = list(state["rates"]), list(state["pushed"])
