"""The `thinwire` command. The only reader of argv and environment, the only printer."""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperGroup

import thinwire
from thinwire.cli.console import Interrupted, drop_output, errors
from thinwire.cli.lazy import add_lazy
from thinwire.errors import ConfigError, ThinwireError
from thinwire.extras import EXTRAS, LAB, LAB_COMMANDS, missing
from thinwire.plugins import load

INTERRUPTED = 130
"""The exit status that typer turns Ctrl-C into, after everything was cleaned up."""


class _Commands(TyperGroup):
    """The commands; the name of a command of the lab raises an error where the lab is not installed."""

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        if args and args[0] in LAB_COMMANDS and self.get_command(context, args[0]) is None:
            raise ConfigError(f"thinwire {args[0]} {LAB}")
        return super().resolve_command(context, args)


app = typer.Typer(
    cls=_Commands,
    help="Train PyTorch models over thin wires: every state change packed 20–140× smaller, accuracy kept.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
COMMANDS: dict[str, tuple[str, str]] = {
    "server": (
        "server",
        "Serve one training: the first worker brings the model and the optimizer; ends when all workers have left.",
    ),
    "certs": (
        "certs",
        "Make a certificate authority, a server's and workers' certificates, and tokens. Nothing is overwritten.",
    ),
    "plan": ("plan", "Predict the seconds of a step by design, link and workers, and say whether compression pays."),
    "watch": ("watch", "Show a training while it runs: speed, bytes, ratio, lag and its largest tensors."),
    "report": (
        "report",
        "Make one page of a training's step records: times, bytes, ratio, lag, accuracy, and a verdict.",
    ),
    "inspect": (
        "inspect",
        "Explain the bytes of a frame; list codecs, models or data sets. (Designs: `thinwire designs`.)",
    ),
    "codecs": ("inspect", "List every codec with its ratio and relative error on real gradients, as recorded."),
    "designs": (
        "inspect",
        "List designs with every choice spelled out: codecs both ways, consistency, placement and the rest.",
    ),
}
"""By the command's name: its module in `thinwire.cli`, and the first paragraph of its description."""

for _name, (_module, _about) in COMMANDS.items():
    add_lazy(app, _name, _about, f"thinwire.cli.{_module}")
for _point in entry_points(group="thinwire.commands"):
    load(_point)(app)


def _version(show: bool) -> None:
    if show:
        sys.stdout.write(f"thinwire {thinwire.__version__}\n")
        sys.stdout.flush()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    """Shows the help where there is no command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """Prints a warning as one line; all but a UserWarning with their place in the code."""
    place = "" if issubclass(category, UserWarning) else f" ({filename}:{lineno}, {category.__name__})"
    errors.print(f"[yellow]warning:[/] {escape(str(message))}{escape(place)}", highlight=False, soft_wrap=True)


def _end_in_order() -> None:
    """Lets SIGTERM and SIGHUP end a command as Ctrl-C does, with its child processes and temporary files.

    A worker or server, or a process that an engine started, has no children, and ends at once: it may be started again.
    A container's first process needs a handler, since the kernel delivers no other signal to it.
    """
    alone = "--events" in sys.argv or sys.argv[1:2] in (["worker"], ["server"])
    if alone and os.getpid() != 1:
        return

    def end(received: int, _: object) -> None:
        if alone:
            os._exit(128 + received)
        sys.exit(128 + received)

    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_DFL:  # not what nohup lets pass
            signal.signal(signum, end)


def _print_anything() -> None:
    """Lets a terminal or pipe that cannot show a sign, such as ×, show a question mark in its place.

    Invalid bytes of a file's name are spelled out where all signs can be shown.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            utf = stream.encoding.lower().startswith("utf")
            with suppress(OSError):  # it was opened on a file, in whose place a process that forks has put a pipe
                stream.reconfigure(errors="backslashreplace" if utf else "replace")


def _output_fails() -> bool:
    """Whether standard output refuses even a line break, as on a full disk; an OSError does not name the file."""
    try:
        if sys.stdout is not None:
            sys.stdout.write("\n")
            sys.stdout.flush()
    except OSError:
        return True
    return False


def _fail(said: object, status: int) -> NoReturn:
    errors.print(f"[red]error:[/] {escape(str(said))}", highlight=False, soft_wrap=True)
    sys.exit(status)


def run() -> None:
    """Runs the command; an error that we raised on purpose is one line on standard error, not a traceback."""
    warnings.showwarning = _show_warning
    _print_anything()
    _end_in_order()
    try:
        app()
    except ModuleNotFoundError as error:
        if (library := (error.name or "").partition(".")[0]) not in EXTRAS:
            raise
        _fail(missing("this command", library), 2)
    except ThinwireError as error:
        status = 2 if isinstance(error, ConfigError) else INTERRUPTED if isinstance(error, Interrupted) else 1
        _fail(error, status)
    except PermissionError as error:  # of a folder that was read; files that are written have errors of their own
        _fail(f"{error.filename}: {error.strerror}", 2)
    except OSError as error:
        if not _output_fails():
            raise
        drop_output()
        _fail(f"standard output cannot be written: {error.strerror}", 2)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            errors.print("interrupted; every process was stopped")
        raise
