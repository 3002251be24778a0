"""The optional libraries of thinwire, and the extra that installs each.

The base install has the libraries of codecs and hooks. A feature that needs more checks for them here, before it
starts: the error then names the missing libraries and the command that installs them. pip finds the extras of an
installed thinwire without a package index.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from thinwire.errors import ConfigError

EXTRAS = {
    "grpc": "server",
    "matplotlib": "plot",
    "prometheus_client": "metrics",
    "ray": "ray",
    "rich": "cli",
    "typer": "cli",
}
"""The extra of pyproject.toml that installs each module."""

IN_LAB = {
    "codec": frozenset({"dithering", "mqe1", "qsgd", "qsgd-ds", "randomk", "stoch3", "threshold", "truncate"}),
    "design": frozenset({"mqe1", "qsgd-ds", "sparse5", "stoch3"}),
}
"""Names that thinwire-lab adds, a separate distribution in the folder lab of the repository."""


def in_lab(kind: str, name: object) -> ConfigError | None:
    """Returns the error for a name that only thinwire-lab knows; None for all other names.

    Example:
        >>> print(in_lab("codec", "qsgd"))
        the codec 'qsgd' is in thinwire-lab, which is not installed: pip install ./lab
    """
    if name not in IN_LAB[kind]:
        return None
    return ConfigError(f"the {kind} {name!r} is in thinwire-lab, which is not installed: pip install ./lab")


LAB = "comes with thinwire-lab, which is not installed: pip install ./lab"
"""The end of a message about a feature of the second distribution of this repository."""
LAB_COMMANDS = frozenset({"demo", "train", "run", "worker", "compare", "reproduce", "bench", "race", "chaos"})


def missing(what: str, *modules: str) -> ConfigError:
    """Returns the error for `what`, which needs modules that are not installed.

    Example:
        >>> print(missing("a parameter server", "grpc"))
        a parameter server needs grpc, which is not installed: pip install 'thinwire[server]'
        >>> print(missing("a server", "grpc", "typer", "rich"))
        a server needs grpc and typer and rich, which are not installed: pip install 'thinwire[cli,server]'
    """
    extras = ",".join(sorted({EXTRAS[module] for module in modules}))
    needed, are = " and ".join(modules), "is" if len(modules) == 1 else "are"
    return ConfigError(f"{what} needs {needed}, which {are} not installed: pip install 'thinwire[{extras}]'")


def require(what: str, *modules: str) -> None:
    """Checks that modules are installed, without importing them.

    Args:
        what: the feature that needs them, as the start of a sentence.
        modules: names in `EXTRAS`.

    Raises:
        ConfigError: one or more are not installed; the message names them.
    """
    if absent := [module for module in modules if not _found(module)]:
        raise missing(what, *absent)


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # import hooks that refuse a module raise it
        return False


class LazyModule:
    """A module that is imported when one of its names is first used.

    Args:
        name: the module's full name.
        what: the feature that needs it, if it may not be installed.
    """

    def __init__(self, name: str, what: str = "") -> None:
        self._name, self._what = name, what

    def __getattr__(self, attribute: str) -> Any:
        try:
            module = import_module(self._name)
        except ModuleNotFoundError as error:
            if error.name != self._name or self._name not in EXTRAS:
                raise  # another module is missing; thinwire's command line reports it by name
            raise missing(self._what, self._name) from error
        value = getattr(module, attribute)
        if self._name in EXTRAS:  # cached: a server reads grpc's names for every message
            setattr(self, attribute, value)
        return value


def optional(module: str, what: str) -> Any:
    """Returns a placeholder for a module of `EXTRAS` that imports it when `what` first uses it.

    Example:
        >>> grpc = optional("grpc", "a parameter server")
        >>> grpc.StatusCode.OK.name
        'OK'
    """
    return LazyModule(module, what)
