"""The `thinwire` command. The only reader of argv and environment, the only printer."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, Any

import typer
from rich.markup import escape

import thinwire
from thinwire.cli import bench, certs, chaos, compare, demo, inspect, reproduce, roles, train
from thinwire.cli.console import errors
from thinwire.errors import ConfigError, ThinwireError

INTERRUPTED = 130
"""The exit status that typer turns Ctrl-C into, after everything was cleaned up."""

app = typer.Typer(
    help="Train PyTorch models over thin wires: every state change packed 20–160× smaller, accuracy kept.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for _part in (demo, train, compare, reproduce, roles, certs, inspect):
    app.add_typer(_part.app)
app.add_typer(bench.app, name="bench")
app.add_typer(chaos.app, name="chaos")


def _version(show: bool) -> None:
    if show:
        sys.stdout.write(f"thinwire {thinwire.__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    """Nothing to do before a command."""


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """Prints a warning as one line; of what people can do nothing about, with its place in the code."""
    place = "" if issubclass(category, UserWarning) else f" ({filename}:{lineno}, {category.__name__})"
    errors.print(f"[yellow]warning:[/] {escape(str(message))}{escape(place)}", highlight=False, soft_wrap=True)


def run() -> None:
    """Runs the command; an error that we raised on purpose is one line on standard error, not a traceback."""
    warnings.showwarning = _show_warning
    try:
        app()
    except ConfigError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except ThinwireError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            errors.print("interrupted; every process was stopped")
        raise
