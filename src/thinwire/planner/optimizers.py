"""The optimizer of a training that was watched, for one tensor at a time.

Many designs send an optimizer's output in place of a gradient: pulls carry the steps of the server's optimizer, local
updates those of a worker's. A plan that codes such values has to compute them as the training does.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.policies.adaptive import is_adaptive

NAMES = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")
"""Optimizers of `torch.optim` whose step of one tensor needs no other tensor and no closure."""
_STANDS_IN: Mapping[str, Any] = {"lr": 0.01, "momentum": 0.9}


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """An optimizer, by its name, and its numbers for each tensor.

    Args:
        name: one of `NAMES`; by default SGD with momentum, which replaces an unknown optimizer.
        options: of its parameter group, by tensor.
        own: the class of the training's own, where it is adaptive and another one stands in.

    Example:
        >>> parameter = torch.zeros(2, requires_grad=True)
        >>> Trainer(name="AdamW", options={"fc.weight": {"lr": 0.1}}).optimizer("fc.weight", parameter).defaults["lr"]
        0.1
        >>> type(Trainer().optimizer("fc.weight", parameter)).__name__
        'SGD'
    """

    name: str = "SGD"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    own: str = ""

    @property
    def kind(self) -> str:
        """The class of the training's own optimizer."""
        return self.own or self.name

    def optimizer(self, tensor: str, parameter: torch.Tensor) -> torch.optim.Optimizer:
        """Returns the optimizer of one tensor, which begins with no state."""
        made: torch.optim.Optimizer = getattr(torch.optim, self.name)(
            [parameter], **self.options.get(tensor, _STANDS_IN if self.name == "SGD" else {})
        )
        return made


def trainer_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Trainer | None:
    """Returns an optimizer's class and numbers; None for one that trains no tensor here, or that SGD may replace.

    Args:
        optimizer: whose steps were seen.
        names: of the model's tensors, by `id` of the parameter.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> names = {id(each): name for name, each in layer.named_parameters()}
        >>> trainer_of(torch.optim.SGD(layer.parameters(), lr=0.5), names).options["bias"]["lr"]
        0.5
        >>> trainer_of(torch.optim.LBFGS(layer.parameters()), names).kind
        'LBFGS'
    """
    kind = type(optimizer)
    if not any(id(each) in names for group in optimizer.param_groups for each in group["params"]):
        return None
    unknown = Trainer(own=kind.__name__) if is_adaptive(optimizer) else None
    if kind.__name__ not in NAMES or kind is not getattr(torch.optim, kind.__name__):
        return unknown
    taken = inspect.signature(kind).parameters.keys()
    options = {}
    for group in optimizer.param_groups:
        own = {name: _plain(value) for name, value in group.items() if name in taken and name != "params"}
        own.update({name: False for name in ("fused", "capturable") if name in own})  # the stand-in is on the host
        if own.get("lr") == 0:
            own.pop("lr")  # of a warm-up's first step; codecs do not see how large values are
        options.update({names[id(each)]: own for each in group["params"] if id(each) in names})
    found = Trainer(name=kind.__name__, options=options)
    try:
        for each in options:
            found.optimizer(each, torch.zeros(1))
    except (TypeError, ValueError):  # a schedule may set options that the constructor refuses
        return unknown
    return found


def _plain(value: Any) -> Any:
    """A number in place of a tensor, or of NumPy's, wherever it stands."""
    if isinstance(value, list | tuple):
        return tuple(_plain(each) for each in value)
    return value.item() if hasattr(value, "item") else value
