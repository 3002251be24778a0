"""The server's optimizer: a stock torch optimizer, chosen by name from an allow-list, with JSON options.

Nothing is unpickled: a worker names its optimizer and its options, and only what is listed here is built. Torch
checks some options where an optimizer is made, some at the first step and some never; so options are tried out on
one value before they are taken.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.errors import ProtocolError
from thinwire.schema import Plan
from thinwire.server.options import LOCAL_OPTIONS, Options, thaw

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


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for the updates of one clock.

    Args:
        rates: the learning rate of every parameter group of the plan.
        groups: their other options, as JSON values.
    """

    rates: tuple[float, ...]
    groups: tuple[Options, ...]


class Updater:
    """One torch optimizer over a shard's tables.

    Raises:
        ProtocolError: an optimizer that is not allowed, or options it does not take.
    """

    def __init__(self, plan: Plan, values: Sequence[torch.Tensor | None]) -> None:
        if plan.optimizer not in ALLOWED:
            raise ProtocolError(f"optimizer {plan.optimizer!r} is not on the server's list: {', '.join(ALLOWED)}")
        kind = ALLOWED[plan.optimizer]
        self._groups: tuple[Options, ...] = plan.groups
        options = [{key: thaw(value) for key, value in group.items()} for group in plan.groups]
        _try_out(kind, options)
        groups: list[dict[str, Any]] = [
            {
                **chosen,
                "params": [
                    value
                    for spec, value in zip(plan.tables, values, strict=True)
                    if value is not None and spec.group == index
                ],
            }
            for index, chosen in enumerate(options)
        ]
        self._kept = [index for index, group in enumerate(groups) if group["params"]]
        if not self._kept:
            raise ProtocolError("the plan has no table that the optimizer could update")
        self.optimizer = _build(kind, [groups[index] for index in self._kept])

    def set(self, settings: Settings) -> None:
        """Sets the learning rate and the options of every parameter group of the plan."""
        for group, index in zip(self.optimizer.param_groups, self._kept, strict=True):
            group["lr"] = settings.rates[index]
        if settings.groups is not self._groups:
            self._groups = settings.groups
            for group, index in zip(self.optimizer.param_groups, self._kept, strict=True):
                group.update({key: thaw(value) for key, value in settings.groups[index].items()})

    def state_dict(self) -> dict[str, Any]:
        """Torch's own: momenta, step counts and options, by position."""
        return copy.deepcopy(self.optimizer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.optimizer.load_state_dict(state)
        self._groups = ()  # the state's options hold until the next settings come

    def step(self, values: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Updates `values` in place by `grads`; every other table stays as it is."""
        for value, grad in zip(values, grads, strict=True):
            value.grad = grad
        self.optimizer.step()
        for value in values:
            value.grad = None


def _build(kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    # Some options count only as the constructor's arguments (Adagrad's first accumulator), and all groups share them.
    taken = inspect.signature(kind).parameters.keys() - {"params"}
    return kind(groups, **{key: value for key, value in groups[0].items() if key in taken})


def _try_out(kind: type[torch.optim.Optimizer], options: Sequence[Mapping[str, Any]]) -> None:
    known = kind([torch.zeros(1)]).defaults.keys() - LOCAL_OPTIONS  # type: ignore[call-arg]
    for chosen in options:
        if unknown := chosen.keys() - known:
            raise ProtocolError(f"{kind.__name__} does not take {sorted(unknown)}; it takes {sorted(known)}")
        value = torch.zeros(1)
        try:
            trial = _build(kind, [{**chosen, "params": [value]}])
            for _ in range(2):  # a momentum is used from the second step on
                value.grad = torch.zeros(1)
                trial.step()
        except Exception as error:  # torch lets out anything: TypeError, IndexError, AssertionError …
            raise ProtocolError(f"{kind.__name__} does not take these options: {error}") from error
