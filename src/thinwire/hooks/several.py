"""Several optimizers of one model, as one, such as Muon for matrices and AdamW for the rest.

Each takes its own step with its own state. One list holds the parameter groups of all, the same dicts, so a
learning-rate scheduler of the combination or of one optimizer has the same effect.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from thinwire.errors import ConfigError


class Several(torch.optim.Optimizer):
    """One torch optimizer made of several, which share no parameter.

    Args:
        optimizers: two or more; `step` calls them in this order.

    Raises:
        ConfigError: two of them have the same parameter, or one needs a closure for its step (LBFGS).

    Example:
        >>> matrix, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
        >>> both = Several([torch.optim.SGD([matrix], lr=0.5), torch.optim.AdamW([bias], lr=0.1)])
        >>> (matrix.sum() + bias.sum()).backward()
        >>> both.step()
        >>> len(both.param_groups), matrix[0].tolist(), len(both.state[bias])
        (2, [0.5, 0.5], 3)
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        for each in self.optimizers:
            if isinstance(each, torch.optim.LBFGS):
                raise ConfigError("LBFGS computes the loss again within a step: it cannot be one of several optimizers")
        held: dict[int, int] = {}
        for index, each in enumerate(self.optimizers):
            for parameter in _parameters(each):
                if id(parameter) in held:
                    raise ConfigError(
                        f"optimizers {held[id(parameter)]} and {index} both hold a parameter of shape "
                        f"{tuple(parameter.shape)}: give each parameter to one of them"
                    )
                held[id(parameter)] = index
        super().__init__(list(self.optimizers[0].param_groups), {})
        self._follow()  # bypasses torch's check that all groups name their parameters, or none
        # Set after `__init__`, which would add them to all groups. OneCycleLR reads them.
        first, *others = (each.defaults for each in self.optimizers)
        self.defaults = {name: value for name, value in first.items() if all(name in each for each in others)}
        self.state = _States(self.optimizers)  # type: ignore[assignment]
        for each in self.optimizers:
            each.register_load_state_dict_post_hook(self._follow)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Calls the closure, if any, once, and runs the step of every optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes a copy of its optimizers."""
        self.__init__(state["optimizers"])  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Returns a state in torch's format, from each optimizer's own `state_dict`, which some define differently.

        Parameter numbers continue from one optimizer to the next.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        states: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for each in self.optimizers:
            own, first = each.state_dict(), sum(len(group["params"]) for group in groups)
            states |= {_moved(key, first): state for key, state in own["state"].items()}
            groups += [{**group, "params": [first + n for n in group["params"]]} for group in own["param_groups"]]
        found = {"state": states, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            found = after(self, found) or found
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads each optimizer's part of a state.

        Raises:
            ValueError: the state has other groups, as in torch; no part was loaded.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self._groups()]:
            raise ValueError("loaded state dict has parameter groups of another number or size than these optimizers'")
        for each in self.optimizers:
            own, groups = groups[: len(each.param_groups)], groups[len(each.param_groups) :]
            numbers = {n: place for place, n in enumerate(n for group in own for n in group["params"])}
            each.load_state_dict(
                {
                    "state": {
                        numbers.get(key, key): state
                        for key, state in state_dict["state"].items()
                        if key in numbers or not isinstance(key, int)
                    },
                    "param_groups": [{**group, "params": [numbers[n] for n in group["params"]]} for group in own],
                }
            )
        self._follow()  # for an optimizer that replaces its groups and calls no hooks
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for each in self.optimizers for group in each.param_groups]

    def _follow(self, *_: Any) -> None:
        """Puts groups that an optimizer has replaced into the list that schedulers may hold."""
        self.param_groups[:] = self._groups()


class _States(Mapping[torch.Tensor, Any]):
    """The optimizers' current states of all parameters."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        for each in self._optimizers:
            if parameter in each.state:
                return each.state[parameter]
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.chain(*(each.state for each in self._optimizers))

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)


def _moved(key: Any, first: int) -> Any:
    """Returns a parameter's number plus `first`; a key of no parameter is a name, and unchanged."""
    return first + key if isinstance(key, int) else key


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def as_one(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Returns one optimizer: the argument, the only one in a list, or `Several`.

    Raises:
        ConfigError: an empty list, or a value that is no torch optimizer.
    """
    if not isinstance(optimizer, Sequence):
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(f"a {type(optimizer).__name__} is no torch optimizer: give one, or a list of several")
        return optimizer
    for each in optimizer:
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigError(f"a list of optimizers holds a {type(each).__name__}, which is no torch optimizer")
    if not optimizer:
        raise ConfigError("an empty list of optimizers: give the one that the model is trained with")
    return optimizer[0] if len(optimizer) == 1 else Several(optimizer)


def parts(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Returns the optimizers of a `Several`, or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, Several) else (optimizer,)


def num_held(optimizer: torch.optim.Optimizer) -> int:
    """Returns the number of parameters that an optimizer, or its parts, have now."""
    return sum(len(group["params"]) for each in parts(optimizer) for group in each.param_groups)


def class_names(optimizer: torch.optim.Optimizer) -> str:
    """Returns the class name of an optimizer, or the names of its parts."""
    return " and ".join(type(each).__name__ for each in parts(optimizer))
