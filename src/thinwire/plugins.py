"""What other packages offer under our entry points: loaded one by one, so that a broken one spoils nothing else."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

from thinwire.cautions import caution
from thinwire.errors import ConfigError


def load(point: EntryPoint, kind: type | None = None) -> Any:
    """Returns what an entry point names.

    Args:
        point: of the package.
        kind: the class that what it names derives from; None: it may be anything that can be called.

    Raises:
        ConfigError: it cannot be loaded, or is something else; the message names the package.
    """
    package = "" if point.dist is None else f" of the package {point.dist.name!r}"
    try:
        found = point.load()
    except Exception as error:  # whatever another package does when it is imported
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
    """As `load`, where somebody else may have been asked for: None and a warning, once, of what cannot be loaded."""
    try:
        return load(point, kind)
    except ConfigError as error:
        caution(f"{error}. All else goes on without it")
        return None
