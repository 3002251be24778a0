"""SignSGD: a step of equal size for every value, in the direction of its sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SignSGD(torch.optim.Optimizer):
    """θ ← θ − lr · sign(g), with the mean g of the workers' values, as in DeMo (Peng, Quesnelle & Kingma 2024).

    Args:
        params: tensors, or parameter groups.
        lr: the size of a step.
        sign: False steps by g itself, for groups that take the mean unchanged (a model's buffers).

    Example:
        >>> weight = torch.tensor([1.0, 1.0, 1.0], requires_grad=True)
        >>> weight.grad = torch.tensor([0.3, -2.0, 0.0])
        >>> SignSGD([weight], lr=0.5).step()
        >>> weight.tolist()
        [0.5, 1.5, 1.0]
    """

    def __init__(self, params: Any, lr: float = 1e-3, *, sign: bool = True) -> None:
        super().__init__(params, {"lr": lr, "sign": sign})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every tensor that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    step = parameter.grad.sign() if group["sign"] else parameter.grad
                    parameter.add_(step, alpha=-group["lr"])
        return loss
