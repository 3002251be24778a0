"""Loads other packages' objects under our entry points, one by one, so that a broken one affects no other."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

from thinwire.cautions import caution
from thinwire.errors import ConfigError


def load(point: EntryPoint, kind: type | None = None) -> Any:
    """Returns the object of an entry point.

    Args:
        point: of the package.
        kind: the base class of the object, which is a class; None: any callable.

    Raises:
        ConfigError: the object cannot be loaded, or is of another kind; the message names the package.
    """
    package = "" if point.dist is None else f" of the package {point.dist.name!r}"
    try:
        found = point.load()
    except Exception as error:  # the import of another package may raise any
        raise ConfigError(
            f"{point.name!r} ({point.group}){package} cannot be loaded from {point.value}: {type(error).__name__}: "
            f"{error}. Mend that package, or uninstall it"
        ) from error
    if not callable(found) or (kind is not None and not (isinstance(found, type) and issubclass(found, kind))):
        wanted = "something to call" if kind is None else f"a class derived from {kind.__module__}.{kind.__name__}"
        raise ConfigError(
            f"{point.name!r} ({point.group}){package} is {found!r:.80}, where {wanted} is expected. Mend that package, "
            "or uninstall it"
        )
    return found


@cache
def load_or_warn(point: EntryPoint, kind: type | None = None) -> Any:
    """As `load`, for objects that the caller may not need: warns once and returns None if loading fails."""
    try:
        return load(point, kind)
    except ConfigError as error:
        caution(f"{error}. thinwire continues without it")
        return None
