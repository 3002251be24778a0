"""The server's optimizer: a stock torch optimizer, chosen by name from an allow-list, with JSON options.

Nothing is unpickled: a worker names its optimizer and its options, and only what is listed here is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thinwire.errors import ProtocolError
from thinwire.schema import Plan

ALLOWED: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind
    for kind in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
    )
}

LOCAL_OPTIONS = frozenset({"params", "lr", "foreach", "fused", "capturable", "differentiable", "initial_lr"})
"""Options that do not travel with the plan: how a machine computes, and the rate, which every push brings."""


class Updater:
    """One torch optimizer over a shard's tables.

    Raises:
        ProtocolError: an optimizer that is not allowed, or options it does not take.
    """

    def __init__(self, plan: Plan, values: Sequence[torch.Tensor | None]) -> None:
        if plan.optimizer not in ALLOWED:
            raise ProtocolError(f"optimizer {plan.optimizer!r} is not on the server's list: {', '.join(ALLOWED)}")
        groups: list[dict[str, Any]] = [
            {
                **{key: _thaw(value) for key, value in options.items()},
                "params": [
                    value
                    for spec, value in zip(plan.tables, values, strict=True)
                    if value is not None and spec.group == index
                ],
            }
            for index, options in enumerate(plan.groups)
        ]
        self._kept = [index for index, group in enumerate(groups) if group["params"]]
        try:
            self.optimizer = ALLOWED[plan.optimizer]([groups[index] for index in self._kept])  # type: ignore[call-arg]
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"{plan.optimizer} does not take these options: {error}") from error

    def set_rates(self, rates: Sequence[float]) -> None:
        """Sets the learning rate of every parameter group of the plan."""
        for group, index in zip(self.optimizer.param_groups, self._kept, strict=True):
            if index < len(rates):
                group["lr"] = rates[index]

    def step(self, values: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Updates `values` in place by `grads`; every other table stays as it is."""
        for value, grad in zip(values, grads, strict=True):
            value.grad = grad
        self.optimizer.step()
        for value in values:
            value.grad = None


def portable_options(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter group's options as JSON values, without those of the worker's machine alone."""
    return {key: _freeze(value) for key, value in group.items() if key not in LOCAL_OPTIONS}


def _freeze(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _thaw(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
