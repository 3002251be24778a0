"""A stock torch optimizer over tables, chosen by name from an allow-list, with JSON options.

A shard unpickles nothing: a worker names its optimizer and its options, and only optimizers in `ALLOWED` are made.
Torch checks some options in the constructor, some at the first step and some never; the runner therefore tries all
options on one value.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from thinwire.errors import ProtocolError
from thinwire.optimizers.options import LOCAL_OPTIONS, Options, Settings
from thinwire.optimizers.sign_sgd import SignSGD
from thinwire.states import load_optimizer

_NAMES = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop")
ALLOWED: dict[str, type[torch.optim.Optimizer]] = {name: getattr(torch.optim, name) for name in _NAMES}
ALLOWED["SignSGD"] = SignSGD


class OptimizerRunner:
    """One torch optimizer over the tables of a shard, or over all tables of a worker.

    Args:
        name: of the optimizer's class, one of `ALLOWED`.
        groups: the options of every parameter group, JSON values.
        tables: for every table the index of its parameter group and its values, which are updated in place.

    Raises:
        ProtocolError: the optimizer is not allowed, or does not take the options.
    """

    def __init__(self, name: str, groups: Sequence[Options], tables: Iterable[tuple[int, torch.Tensor]]) -> None:
        if name not in ALLOWED:
            raise ProtocolError(f"optimizer {name!r} is not on the server's list: {', '.join(ALLOWED)}")
        kind = ALLOWED[name]
        self._options: tuple[Options, ...] = tuple(groups)
        _try_out(kind, groups)
        members: list[list[torch.Tensor]] = [[] for _ in groups]
        for index, values in tables:
            members[index].append(values)
        self._used = [index for index, values in enumerate(members) if values]
        if not self._used:
            raise ProtocolError("the plan has no table that the optimizer could update")
        self.optimizer = _build(kind, [{**_for_torch(groups[index]), "params": members[index]} for index in self._used])

    def set(self, settings: Settings) -> None:
        """Sets the learning rate and the options of every parameter group of the plan."""
        for group, index in zip(self.optimizer.param_groups, self._used, strict=True):
            group["lr"] = settings.rates[index]
        if settings.groups is not self._options:
            self._options = settings.groups
            for group, index in zip(self.optimizer.param_groups, self._used, strict=True):
                group.update(_for_torch(settings.groups[index]))

    def step(self, values: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Updates `values` in place by `grads`; all other tables are unchanged."""
        for value, grad in zip(values, grads, strict=True):
            value.grad = grad
        self.optimizer.step()
        for value in values:
            value.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of torch's state: momenta, step counts and options, by position."""
        return copy.deepcopy(self.optimizer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state from `state_dict`. Raises ConfigError for anything else, before a change."""
        load_optimizer(self.optimizer, state, type(self.optimizer).__name__)
        self._options = ()  # the state's options apply until the next settings


def _for_torch(options: Options) -> dict[str, Any]:
    """Returns JSON values as torch expects them: pairs as tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def _build(kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    # Some options apply only as the constructor's arguments (Adagrad's first accumulator), and all groups share them.
    taken = inspect.signature(kind).parameters.keys() - {"params"}
    return kind(groups, **{key: value for key, value in groups[0].items() if key in taken})


def _try_out(kind: type[torch.optim.Optimizer], groups: Iterable[Mapping[str, Any]]) -> None:
    known = kind([torch.zeros(1)]).defaults.keys() - LOCAL_OPTIONS  # type: ignore[call-arg]
    for options in groups:
        if unknown := options.keys() - known:
            raise ProtocolError(f"{kind.__name__} does not take {sorted(unknown)}; it takes {sorted(known)}")
        if wrong := [key for key, value in options.items() if isinstance(value, float) and not math.isfinite(value)]:
            raise ProtocolError(f"{kind.__name__} got {options[wrong[0]]} as its {wrong[0]}")
        value = torch.zeros(1)
        try:
            trial = _build(kind, [{**_for_torch(options), "params": [value]}])
            for _ in range(2):  # a momentum is used from the second step on
                value.grad = torch.zeros(1)
                trial.step()
        except Exception as error:  # torch raises many types: TypeError, IndexError, AssertionError …
            raise ProtocolError(f"{kind.__name__} does not take these options: {error}") from error
