"""Deferred imports: a command's module when it is chosen, and other modules when it runs.

Importing torch takes longer than everything else that `--help` and a misspelt option need, so neither may import it.
The table of commands in `main` names modules and one-line descriptions; `add_lazy` imports a module when its command is
chosen. A command's module declares options, and imports all other modules inside `with lazily()`.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import typer
from rich.markup import escape
from typer.core import TyperCommand
from typer.main import get_group

from thinwire.extras import LazyModule


def _stand_in(name: str, _: Any = None, __: Any = None, names: tuple[str, ...] = (), ___: int = 0) -> SimpleNamespace:
    return SimpleNamespace(**{each: LazyModule(f"{name}.{each}") for each in names})


@contextmanager
def lazily() -> Iterator[None]:
    """Within it, `from package import module` imports the module when one of its names is first used.

    Example:
        >>> with lazily():
        ...     from importlib import metadata
        >>> type(metadata).__name__, callable(metadata.version)
        ('LazyModule', True)
    """
    real = builtins.__import__
    builtins.__import__ = _stand_in  # type: ignore[assignment]
    try:
        yield
    finally:
        builtins.__import__ = real


class LazyCommand(TyperCommand):
    """A command of which only name and description are known until it is chosen."""

    module: ClassVar[str]

    def load(self) -> Any:  # commands and contexts are of typer's private classes
        """Imports the module, and returns its command of this name."""
        module: ModuleType = import_module(self.module)
        command = get_group(module.app).commands[self.name or ""]
        if command.epilog:
            command.epilog = escape(command.epilog)  # examples have designs' brackets, which markup would swallow
        if command.help:
            command.help = _filled(command.help)
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parses the command line with the loaded command's options; the returned context is that command's.

        `--resume` may stand alone where it takes a value: then it is `--resume=newest`.
        """
        command = self.load()
        resumes = any("--resume" in each.opts and not each.is_flag for each in command.params)
        given = ["--resume=newest" if resumes and each == "--resume" else each for each in args]
        return command.make_context(info_name, given, parent, **extra)


def _filled(text: str) -> str:
    """Returns paragraphs without the line ends of the source, which markup would keep.

    >>> _filled("one\\nline\\n\\nanother")
    'one line\\n\\nanother'
    """
    return "\n\n".join(" ".join(each.split()) for each in text.split("\n\n"))


def add_lazy(
    app: typer.Typer, name: str, about: str, module: str, *, hidden: bool = False, panel: str | None = None
) -> None:
    """Adds a command whose module is imported on demand.

    Args:
        app: to which it is added.
        name: of the command.
        about: the first paragraph of its description.
        module: whose Typer application `app` holds it.
        hidden: it is not listed.
        panel: of the list of commands.
    """
    loaded = type("LazyCommand", (LazyCommand,), {"module": module})
    app.command(name, help=about, hidden=hidden, cls=loaded, rich_help_panel=panel)(_by_its_options)


def _by_its_options() -> None:
    """The command's own module has its description."""
