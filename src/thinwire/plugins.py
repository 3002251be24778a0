"""What other packages offer under our entry points: loaded one by one, so that a broken one spoils nothing else."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

from thinwire.errors import ConfigError


def load(point: EntryPoint) -> Any:
    """Returns what an entry point names.

    Raises:
        ConfigError: it cannot be loaded; the message names the package.
    """
    try:
        return point.load()
    except Exception as error:  # whatever another package does when it is imported
        package = "" if point.dist is None else f" of the package {point.dist.name!r}"
        raise ConfigError(
            f"{point.name!r} ({point.group}){package} cannot be loaded from {point.value}: {type(error).__name__}: "
            f"{error}. Mend that package, or uninstall it"
        ) from error


@cache
def load_or_warn(point: EntryPoint) -> Any:
    """As `load`, where somebody else may have been asked for: None and a warning, once, of what cannot be loaded."""
    try:
        return load(point)
    except ConfigError as error:
        warnings.warn(f"{error}. All else goes on without it", UserWarning, stacklevel=3)
        return None
