"""The libraries that only some of thinwire needs, and the extra that brings each.

The base install brings what codecs and hooks need. A feature that needs more asks for it here, before it starts
anything: what is missing is then one sentence with the command that installs it. pip finds the extras of an installed
thinwire without a package index.
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
"""The extra of pyproject.toml that brings each module."""

IN_LAB = {
    "codec": frozenset({"dithering", "mqe1", "qsgd", "qsgd-ds", "randomk", "stoch3", "threshold", "truncate"}),
    "design": frozenset({"mqe1", "qsgd-ds", "sparse5", "stoch3"}),
}
"""What thinwire-lab brings, a distribution of its own in the folder lab of the repository."""


def in_lab(kind: str, name: object) -> ConfigError | None:
    """Returns the error of a name that only thinwire-lab knows; None for any other.

    Example:
        >>> print(in_lab("codec", "qsgd"))
        the codec 'qsgd' is in thinwire-lab, which is not installed: pip install ./lab
    """
    if name not in IN_LAB[kind]:
        return None
    return ConfigError(f"the {kind} {name!r} is in thinwire-lab, which is not installed: pip install ./lab")


LAB = "comes with thinwire-lab, which is not installed: pip install ./lab"
"""The end of a sentence about what the second distribution of this repository brings."""
LAB_COMMANDS = frozenset({"demo", "train", "run", "worker", "compare", "reproduce", "bench", "race", "chaos"})


def missing(what: str, *modules: str) -> ConfigError:
    """Returns the error of `what`, which needs modules that are not installed.

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
    """Checks that modules are installed, and imports none.

    Args:
        what: who needs them, as a sentence begins.
        modules: names in `EXTRAS`.

    Raises:
        ConfigError: one is not installed; all that are not are named.
    """
    if absent := [module for module in modules if not _found(module)]:
        raise missing(what, *absent)


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # as whoever refuses the module says it
        return False


class LazyModule:
    """A module that is imported when one of its names is first used.

    Args:
        name: the module's full name.
        what: who needs it, where it may not be installed.
    """

    def __init__(self, name: str, what: str = "") -> None:
        self._name, self._what = name, what

    def __getattr__(self, attribute: str) -> Any:
        try:
            module = import_module(self._name)
        except ModuleNotFoundError as error:
            if error.name != self._name or self._name not in EXTRAS:
                raise  # another module's, which thinwire's command line knows by its name
            raise missing(self._what, self._name) from error
        value = getattr(module, attribute)
        if self._name in EXTRAS:  # kept: a server reads grpc's names with every message
            setattr(self, attribute, value)
        return value


def optional(module: str, what: str) -> Any:
    """Returns what stands for a module of `EXTRAS` until `what` uses it.

    Example:
        >>> grpc = optional("grpc", "a parameter server")
        >>> grpc.StatusCode.OK.name
        'OK'
    """
    return LazyModule(module, what)
