"""Checks the options of a codec against the annotations of a dataclass's fields."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import fields
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from thinwire.errors import ConfigError


class Between(NamedTuple):
    """The allowed range of an option: `fraction: Annotated[float, Between(0, 1)]`. Infinity is never allowed."""

    least: float
    most: float = math.inf
    above: bool = False
    """Whether `least` itself is refused."""


def check_options(options: Any) -> None:
    """Raises ConfigError where a field of a dataclass with an `id` has a value that its annotation does not allow.

    Annotations are `Literal["a", "b"]`, `bool`, `Annotated[int, Between(1, 9)]`, and any of these `| None`.
    """
    kind: Any = type(options)
    for name, (allowed, between, whole, optional) in _rules(kind).items():
        value, said = getattr(options, name), f"{options.id}: {name}={getattr(options, name)!r}; allowed are "
        if optional and value is None:
            continue
        if allowed and value not in allowed:
            raise ConfigError(said + " and ".join(map(repr, (*[None] * optional, *allowed))))
        if between is not None:
            least, most, above = between
            number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not number or not least <= value <= most or abs(value) == math.inf or (above and value == least):
                numbers = "whole numbers" if whole else "finite numbers" if most == math.inf else "numbers"
                limits = f"{'above' if above else 'from'} {least:g}" + (f" to {most:g}" if most < math.inf else "")
                raise ConfigError(f"{said}{'None and ' * optional}{numbers} {limits}")


@functools.cache
def _rules(kind: type[Any]) -> dict[str, tuple[tuple[object, ...], Between | None, bool, bool]]:
    """Returns for each option the allowed values, the range, whether it is an integer, and whether it may be None."""
    rules, hints = {}, get_type_hints(kind, include_extras=True)
    for name in (field.name for field in fields(kind)):
        hint = hints[name]
        inner = _parts(hint)  # Annotated[…] | None
        said = [one for each in inner for one in getattr(each, "__metadata__", ())]
        between = next((one for one in said if isinstance(one, Between)), None)
        plain = [each.__origin__ if get_origin(each) is Annotated else each for each in inner]
        kinds = [one for each in plain for one in _parts(each)]
        literals = [
            (True, False) if one is bool else get_args(one)
            for one in kinds
            if one is bool or get_origin(one) is Literal
        ]
        rules[name] = tuple(itertools.chain(*literals)), between, float not in kinds, type(None) in kinds
    return rules


def _parts(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the hint itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
