"""An optimizer's options as JSON values: the options that are sent, and those that may change, with their bounds.

`ParameterGroups` reads a worker's optimizer at every step; a shard calls `apply_changes` on received changes.
Schedulers move more than the learning rate (OneCycleLR cycles a momentum). These **changes** are sent as pairs of a
parameter group's index and the options that differ from those sent last. Only the numbers in `CHANGEABLE` may change;
an option that decides which state an optimizer stores (`amsgrad`, `centered`) keeps the plan's value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.errors import ConfigError, ProtocolError
from thinwire.schema import Changes

LOCAL_OPTIONS = frozenset({"params", "lr", "foreach", "fused", "capturable", "differentiable", "initial_lr"})
"""Options that are not in the plan: how a machine computes, and the learning rate, which every push carries."""

CHANGEABLE: Mapping[str, float] = {
    **dict.fromkeys(("momentum", "weight_decay", "eps", "alpha", "dampening", "lr_decay", "momentum_decay"), math.inf),
    **dict.fromkeys(("betas", "rho"), 1.0),
}
"""Options that may change, each with its exclusive upper bound; the lower bound is 0."""
LARGEST = torch.finfo(torch.float32).max
"""The bound of learning rates and options: torch computes in float32 and refuses larger numbers."""
ADDED = "no worker sends an added group. Close this one, and distribute model and optimizer again"

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """The hyperparameters of one clock's updates.

    Args:
        rates: the learning rate of every parameter group of the plan.
        groups: the groups' other options, as JSON values.
    """

    rates: tuple[float, ...]
    groups: tuple[Options, ...]


class ParameterGroups:
    """An optimizer's parameter groups, which schedulers write to, and the options sent to the shards.

    Args:
        optimizer: its class name.
        groups: its `param_groups`.
        defaults: its `defaults`: other options are ignored.

    Example:
        >>> groups = [{"lr": 0.1, "momentum": 0.9}]
        >>> watched = ParameterGroups("SGD", groups, {"lr": 1, "momentum": 0})
        >>> watched.settings
        Settings(rates=(0.1,), groups=({'momentum': 0.9},))
        >>> groups[0]["momentum"] = 0.85
        >>> watched.changes(), watched.changes()
        (((0, {'momentum': 0.85}),), ())
    """

    def __init__(self, optimizer: str, groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
        self._optimizer, self._groups, self._defaults = optimizer, groups, defaults
        self._sent = self.settings.groups

    @property
    def rates(self) -> tuple[float, ...]:
        """The present learning rate of every group."""
        return tuple(float(group["lr"]) for group in self._groups)

    @property
    def settings(self) -> Settings:
        """The present learning rates and options."""
        return Settings(self.rates, tuple(portable_options(group, self._defaults) for group in self._groups))

    @property
    def changed(self) -> bool:
        """Whether an option differs from those sent last."""
        return self.settings.groups != self._sent

    def changes(self) -> Changes:
        """Returns the options that differ from those sent last, and counts them as sent.

        Raises:
            ConfigError: an option changed that must not change, or to a value out of range; or a group was added.
        """
        options = self.settings.groups
        if len(options) != len(self._sent):
            raise ConfigError(
                f"the optimizer has {len(options)} parameter groups and tw.distribute was given {len(self._sent)}: "
                f"{ADDED}"
            )
        found = changes(self._sent, options)
        try:
            apply_changes(self._optimizer, self._sent, found)
        except ProtocolError as error:
            raise ConfigError(f"param_groups: {error}") from None
        self._sent = options
        return found


def portable_options(group: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parameter group's options as JSON values, without `LOCAL_OPTIONS`.

    Args:
        group: of an optimizer's `param_groups`.
        known: the optimizer's `defaults`; keys that schedulers and users added to a group are dropped.

    Example:
        >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
        >>> portable_options({**sgd.param_groups[0], "label": "head"}, sgd.defaults)["momentum"]
        0.9
    """
    return {key: _to_json(value) for key, value in group.items() if key in known and key not in LOCAL_OPTIONS}


def changes(before: Iterable[Options], after: Iterable[Options]) -> Changes:
    """Returns the options that differ, group by group.

    >>> changes([{"momentum": 0.9, "eps": 1}, {"momentum": 0.5}], [{"momentum": 0.8, "eps": 1}, {"momentum": 0.5}])
    ((0, {'momentum': 0.8}),)
    """
    pairs = zip(before, after, strict=True)
    found = [{key: value for key, value in new.items() if old.get(key) != value} for old, new in pairs]
    return tuple((index, differing) for index, differing in enumerate(found) if differing)


def apply_changes(optimizer: str, groups: Sequence[Options], received: Changes) -> tuple[Options, ...]:
    """Returns the groups' options with the changes applied.

    Args:
        optimizer: its class name.
        groups: the present options.
        received: the changes, perhaps from a peer.

    Raises:
        ProtocolError: a group that does not exist, an option that must not change, or a value out of range.

    Example:
        >>> apply_changes("SGD", [{"momentum": 0.9}], ((0, {"momentum": 0.85}),))
        ({'momentum': 0.85},)
    """
    result = [dict(group) for group in groups]
    for index, options in received:
        if not 0 <= index < len(result):
            raise ProtocolError(f"options of parameter group {index} changed; there are {len(result)}")
        for key, value in options.items():
            _check(optimizer, result[index], key, value)
            result[index][key] = value
    return tuple(result)


def _check(optimizer: str, options: Options, key: str, value: Any) -> None:
    allowed = sorted(CHANGEABLE.keys() & options.keys())
    if key not in allowed:
        raise ProtocolError(f"{optimizer}: {key!r} changed while training runs; of its options, {allowed} may")
    old, new = _numbers(options[key]), _numbers(value)
    if new is None or old is None or len(new) != len(old) or isinstance(value, list) != isinstance(options[key], list):
        raise ProtocolError(f"{optimizer}: {key} changed from {options[key]!r} to {value!r}; numbers were expected")
    if not all(0 <= number < CHANGEABLE[key] and number <= LARGEST for number in new):
        raise ProtocolError(f"{optimizer}: {key}={value!r}; it lies in [0, {CHANGEABLE[key]:g})")
    if optimizer == "RMSprop" and key == "momentum" and not old[0] and new[0]:
        raise ProtocolError("RMSprop: a momentum that was 0 cannot begin while training runs; plan a small one")


def _numbers(value: Any) -> list[float] | None:
    values = value if isinstance(value, list) else [value]
    if all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
        return values
    return None


def _to_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return [_to_json(each) for each in value] if isinstance(value, tuple | list) else value
