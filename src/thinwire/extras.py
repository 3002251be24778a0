"""The libraries that only some of thinwire needs, and the extra that installs each.

`pip install thinwire` brings what codecs and hooks need. What needs more asks for it here, before it starts anything:
what is missing is then one sentence with the command that installs it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from thinwire.errors import ConfigError

EXTRAS = {
    "grpc": "server",
    "matplotlib": "plot",
    "plotly": "plot",
    "prometheus_client": "metrics",
    "ray": "ray",
    "rich": "cli",
    "typer": "cli",
}
"""The extra of each module; pyproject.toml says which distributions it installs."""


def missing(what: str, module: str) -> ConfigError:
    """Returns the error of `what`, which needs a module that is not installed.

    Example:
        >>> print(missing("a parameter server", "grpc"))
        a parameter server needs grpc, which is not installed: pip install 'thinwire[server]'
    """
    return ConfigError(f"{what} needs {module}, which is not installed: pip install 'thinwire[{EXTRAS[module]}]'")


def require(what: str, *modules: str) -> None:
    """Checks that modules are installed, and imports none.

    Args:
        what: who needs them, as a sentence begins.
        modules: names in `EXTRAS`.

    Raises:
        ConfigError: one is not installed.
    """
    for module in modules:
        try:
            found = find_spec(module) is not None
        except ModuleNotFoundError:  # as whoever refuses the module says it
            found = False
        if not found:
            raise missing(what, module)


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
