"""The `thinwire` command. The only reader of argv and environment, the only printer."""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.markup import escape

import thinwire
from thinwire.cli.console import Interrupted, drop_output, errors
from thinwire.cli.lazy import lazy_command
from thinwire.errors import ConfigError, ThinwireError
from thinwire.extras import DISTRIBUTIONS, missing

INTERRUPTED = 130
"""The exit status that typer turns Ctrl-C into, after everything was cleaned up."""

app = typer.Typer(
    help="Train PyTorch models over thin wires: every state change packed 20–160× smaller, accuracy kept.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench = typer.Typer(
    help="Measure codecs, transports, servers, hooks and whole trainings on this machine.", no_args_is_help=True
)
chaos = typer.Typer(
    help="Kill, freeze and cut off real processes, and see the training end right.", no_args_is_help=True
)

COMMANDS: list[tuple[typer.Typer, str, dict[str, str]]] = [
    (app, "demo", {"demo": "Train digits twice over a thin link, uncompressed and with 3LC, each in the same time."}),
    (
        app,
        "train",
        {
            "train": "Train a model with a server and N workers on this machine, over an emulated link; or on a Ray "
            "cluster."
        },
    ),
    (
        app,
        "compare",
        {
            "compare": "Compare designs on links: accuracy from full runs, seconds per step from short runs on every "
            "link."
        },
    ),
    (
        app,
        "plan",
        {"plan": "Predict the seconds of a step by design, link and workers, and say whether compression pays."},
    ),
    (app, "watch", {"watch": "Show a training while it runs: speed, bytes, ratio, lag and its largest tensors."}),
    (
        app,
        "report",
        {"report": "Make one page of a training's step records: times, bytes, ratio, lag, accuracy, and a verdict."},
    ),
    (app, "reproduce", {"reproduce": "Make tables and figures of the papers again, and show ours beside the paper's."}),
    (
        app,
        "roles",
        {
            "server": "Serve one training: the first worker brings the model and the optimizer; ends when all workers "
            "have left.",
            "worker": "Train as one worker. All workers are started with the same options but `--rank`.",
        },
    ),
    (
        app,
        "certs",
        {
            "certs": "Make a certificate authority, a server's and workers' certificates, and tokens. Nothing is "
            "overwritten."
        },
    ),
    (
        app,
        "inspect",
        {
            "inspect": "Explain the bytes of a frame; list codecs, models or data sets. (Designs: `thinwire designs`.)",
            "designs": "List designs with every choice spelled out: codecs both ways, consistency, placement and the "
            "rest.",
            "codecs": "List every codec with its ratio and relative error on real gradients, as recorded or as "
            "measured here.",
        },
    ),
    (
        bench,
        "bench",
        {
            "codecs": "Encode and decode speed on one thread, beside memcpy, the two-pass floor, plain torch and raw "
            "compressors.",
            "transports": "What a step costs without computation: 30 small tensors from every worker, by size of the "
            "messages.",
            "hooks": "Measure DDP hooks: seconds per step, CPU time and bytes at the interface.",
            "fsdp": "FSDP2 and HSDP on thin links, stock and compressed: seconds per step, bytes, and the loss after "
            "some steps.",
            "race": "Race DDP hooks to a test accuracy, or language models to a held-out loss.",
            "server": "CPU seconds of the server's process per step, with ready-made gradients in place of workers.",
            "updates": "What local updates cost of the processor: a step alone, with plain DDP and with the design, in "
            "turn.",
            "memory": "What a rank takes of memory with every method: bytes a parameter, between steps and at most.",
            "clock": "The computed clock of runs in one process, beside processes behind links that the kernel shapes.",
            "pays": "Does compression pay? Measured steps of every method on every link, beside what the planner "
            "predicts.",
            "designs": "Train every model with every design for a few steps: finished, loss finite, replicas equal?",
            "doors": "Run a script of each framework: are replicas equal, do residuals survive, how many lines change?",
            "hostile": "Attack a server: its memory and threads, and how long an honest worker waits.",
            "role": "One process of a benchmark; the others start it.",
        },
    ),
    (
        chaos,
        "chaos",
        {
            "worker-death": "Kill a worker at a random step and start the same command again.",
            "backup-death": r"Kill as many workers as backup\[b] has to spare, for good.",
            "server-death": "Kill the server and start it again with --resume: the weights must be those of an "
            "undisturbed training.",
            "storm": "Strike one long training after every so many rounds: goodput, accuracy, and no gradient lost or "
            "counted twice.",
            "storms": "Strike many short trainings, of all designs, with faults of all kinds.",
            "soak": "Let workers come and go for an hour, and watch the server's memory, descriptors and threads.",
        },
    ),
]
"""Group, module of `thinwire.cli` and, by the command's name, the first paragraph of its description."""
HIDDEN = {"role"}


def _by_their_options() -> None:
    """What a command of the table does is in its own module."""


for _group, _module, _described in COMMANDS:
    for _name, _about in _described.items():
        _group.command(_name, help=_about, hidden=_name in HIDDEN, cls=lazy_command(f"thinwire.cli.{_module}"))(
            _by_their_options
        )
app.add_typer(bench, name="bench")
app.add_typer(chaos, name="chaos")


def _version(show: bool) -> None:
    if show:
        sys.stdout.write(f"thinwire {thinwire.__version__}\n")
        sys.stdout.flush()
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


def _end_in_order() -> None:
    """Has a signal that ends a command end it as Ctrl-C does: what it started, and wrote for a while, goes with it.

    Not so in processes with nobody of their own: a worker that goes at once is one that may come back, and one that
    another process of ours has started is not waited for. A container's first process, to which the kernel delivers no
    signal that has no handler, goes at once by itself.
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
    """Has a terminal or a pipe that cannot show a sign, such as ×, show a question mark in its place.

    Where all signs can be shown, bytes of a file's name that are none are spelled out.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            utf = stream.encoding.lower().startswith("utf")
            with suppress(OSError):  # it was opened on a file, in whose place a process that forks has put a pipe
                stream.reconfigure(errors="backslashreplace" if utf else "replace")


def _output_fails() -> bool:
    """Whether standard output takes not even a line break, as on a full disk; errors of writing do not say of what."""
    try:
        if sys.stdout is not None:
            sys.stdout.write("\n")
            sys.stdout.flush()
    except OSError:
        return True
    return False


def run() -> None:
    """Runs the command; an error that we raised on purpose is one line on standard error, not a traceback."""
    warnings.showwarning = _show_warning
    _print_anything()
    _end_in_order()
    try:
        app()
    except ModuleNotFoundError as error:
        if (library := (error.name or "").partition(".")[0]) not in DISTRIBUTIONS:
            raise
        errors.print(f"[red]error:[/] {escape(str(missing('this command', library)))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except ConfigError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except ThinwireError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(INTERRUPTED if isinstance(error, Interrupted) else 1)
    except PermissionError as error:  # of a folder that was looked into; where files are written says more
        errors.print(f"[red]error:[/] {escape(f'{error.filename}: {error.strerror}')}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except OSError as error:
        if not _output_fails():
            raise
        drop_output()
        said = f"standard output cannot be written: {error.strerror}"
        errors.print(f"[red]error:[/] {escape(said)}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            errors.print("interrupted; every process was stopped")
        raise
