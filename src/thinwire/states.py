"""Saved states: read as typed records, and checked completely before a change."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch

from thinwire.errors import ConfigError

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A number of steps, ranks or values."""
Version = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
"""The version of a table; −1 before the first."""
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A number that is neither NaN nor Inf."""
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
"""A finite number of 0 or more."""

Record = TypeVar("Record")


def read(kind: type[Record], state: object, of: str) -> Record:
    """Returns a saved state as a record of a type; tensors are not copied.

    Args:
        kind: a `msgspec.Struct` or a type made of those, `torch.Tensor` (which also takes arrays), `Count`, `Finite`
            and plain types.
        state: from a `state_dict()`, or anything else.
        of: its owner, for the message.

    Raises:
        ConfigError: the state is not of this type, or a tensor of floating-point numbers holds NaN or Inf.

    Example:
        >>> class Residual(msgspec.Struct):
        ...     step: Count
        ...     values: torch.Tensor
        >>> read(Residual, {"step": 3, "values": torch.zeros(2)}, "weight").step
        3
        >>> read(Residual, {"step": -5, "values": torch.zeros(2)}, "weight")
        Traceback (most recent call last):
        thinwire.errors.ConfigError: the state of weight is damaged: Expected `int` >= 0 - at `$.step`
    """
    try:
        return msgspec.convert(state, kind, dec_hook=_tensor)
    except (msgspec.ValidationError, AttributeError, IndexError, TypeError) as error:  # the last: a tensor for a dict
        raise ConfigError(f"the state of {of} is damaged: {error}") from error


def _tensor(kind: type, value: object) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not (kind is torch.Tensor and isinstance(value, torch.Tensor)):
        raise ValueError(f"a {kind.__name__} was expected, and {value!r:.60} came")
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise ValueError("a dense tensor was expected")
    if value.is_floating_point() and not value.isfinite().all():
        raise ValueError("a tensor holds NaN or Inf")
    return value


def check_sizes(found: Mapping[str, torch.Tensor], sizes: Mapping[str, int], of: str) -> None:
    """Raises ConfigError where tensors do not fit a model: names or sizes differ, or a tensor does not hold floats.

    Args:
        found: a state's tensors.
        sizes: numbers of values, by name.
        of: the kind of tensors, for the message.
    """
    there = {name: each.numel() if each.is_floating_point() else str(each.dtype) for name, each in found.items()}
    if wrong := sorted(name for name in {*sizes, *there} if sizes.get(name) != there.get(name))[:4]:
        raise ConfigError(
            f"the state's {of} do not fit: {wrong} have {[sizes.get(name) for name in wrong]} values here and "
            f"{[there.get(name) for name in wrong]} in the state; load it with the model and the options that it was "
            "saved with"
        )


def check_groups(found: object, groups: Sequence[Mapping[str, Any]], of: str, required: Collection[str] = ()) -> None:
    """Raises ConfigError where parameter groups do not fit an optimizer's.

    Args:
        found: a state's parameter groups.
        groups: the optimizer's own; a saved option must be of the same kind, and further options are allowed.
        of: the owner, for the message.
        required: options that every saved group has.
    """
    if not isinstance(found, list) or len(found) != len(groups):
        count = len(found) if isinstance(found, list) else type(found).__name__
        raise ConfigError(f"the state of {of} has {count} parameter groups, and this optimizer {len(groups)}")
    for place, (group, own) in enumerate(zip(found, groups, strict=True)):
        if not isinstance(group, dict) or (lacking := {*required} - group.keys()):
            which = "is no dict" if not isinstance(group, dict) else f"lacks {sorted(lacking)}"
            raise ConfigError(f"the state of {of} is damaged: parameter group {place} {which}")
        for key, value in group.items():
            if key != "params" and not _is_like(value, own.get(key)):
                raise ConfigError(
                    f"the state of {of} is damaged: {key!r} of parameter group {place} is {value!r:.60}; here it is "
                    f"{own.get(key)!r:.60}"
                )


def _is_like(value: object, own: object) -> bool:
    """Whether a saved option is finite plain data, and a number if the optimizer's own option is one."""
    if isinstance(value, tuple | list):
        others = own if isinstance(own, tuple | list) and len(own) == len(value) else [None] * len(value)
        return (own is None or isinstance(own, tuple | list)) and all(map(_is_like, value, others))
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and bool(value.isfinite().all())
    if value is None or isinstance(value, bool | str):
        return own is None or value is None or isinstance(own, type(value))
    is_number = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return is_number and (own is None or isinstance(own, int | float | torch.Tensor)) and not isinstance(own, bool)


def load_optimizer(optimizer: torch.optim.Optimizer, state: object, of: str) -> None:
    """Loads the state of a torch optimizer, or raises ConfigError and changes nothing. Arguments as for `loaded`."""
    with loaded(optimizer, state, of):
        pass


@contextmanager
def loaded(optimizer: torch.optim.Optimizer, state: object, of: str) -> Iterator[None]:
    """Gives an optimizer a saved state within the block; restores its own state if the block raises.

    Args:
        optimizer: of any kind; its own methods load and restore a state that does not have torch's form.
        state: from its `state_dict()`.
        of: its owner, for the message.

    Raises:
        ConfigError: the state is not one of this optimizer.
    """
    if not isinstance(state, dict):
        raise ConfigError(f"the state of {of} is damaged: it is a {type(state).__name__}")
    before = copy.deepcopy(optimizer.state_dict())
    if "param_groups" in before:
        check_optimizer(optimizer, state, of)
    try:
        try:
            optimizer.load_state_dict(state)
        except Exception as error:  # an optimizer may raise any
            raise ConfigError(
                f"the state of {of} is not one of this optimizer: {type(error).__name__}: {error}"
            ) from error
        yield
    except BaseException:
        optimizer.load_state_dict(before)
        raise


def check_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], of: str) -> None:
    """Raises ConfigError where a state is not one of a torch optimizer. Arguments as for `loaded`."""
    groups = optimizer.param_groups
    check_groups(state.get("param_groups"), groups, of, optimizer.defaults)
    numbers: list[object] = []
    for found, own in zip(state["param_groups"], groups, strict=True):
        of_group = found.get("params")
        if not isinstance(of_group, list) or len(of_group) != len(own["params"]):
            count = len(of_group) if isinstance(of_group, list) else type(of_group).__name__
            raise ConfigError(f"the state of {of} has a group of {count} parameters; here it has {len(own['params'])}")
        numbers += of_group
    kept = state.get("state")
    is_numbered = all(isinstance(each, int) for each in numbers) and len({*numbers}) == len(numbers)
    if not is_numbered or not isinstance(kept, dict):
        raise ConfigError(f"the state of {of} is damaged: parameters are not numbered, or there is no dict of states")
    parameters = dict(zip(numbers, (p for group in groups for p in group["params"]), strict=True))
    for number, own in kept.items():
        if number in parameters:
            _check_moments(own, parameters[number], f"{of}, parameter {number}", is_torchs=_is_torchs(optimizer))
        elif isinstance(number, int):
            raise ConfigError(f"the state of {of} is damaged: it has no parameter {number}")


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every tensor of an optimizer's state is a scalar or has its parameter's shape."""
    return type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ not in (
        "Adafactor",
        "LBFGS",
    )


def _check_moments(state: object, parameter: torch.Tensor, of: str, *, is_torchs: bool) -> None:
    if not isinstance(state, dict):
        raise ConfigError(f"the state of {of} is damaged: it is a {type(state).__name__}")
    if not is_torchs:
        return
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            fits = value.numel() == 1 or value.shape == parameter.shape
            if not fits or not value.is_floating_point() or not value.isfinite().all():
                raise ConfigError(
                    f"the state of {of} is damaged: {name!r} has shape {tuple(value.shape)} and dtype {value.dtype}, "
                    f"the parameter {tuple(parameter.shape)}, and all values must be finite"
                )
        elif not _is_like(value, None):
            raise ConfigError(f"the state of {of} is damaged: {name!r} is {value!r:.60}")
