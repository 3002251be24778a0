"""The options that several commands share, written once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.outputs import STANDARD_OUTPUT, writable
from thinwire.errors import ConfigError

_NAME = r"(?:[^,\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*"
"""Anything without a comma but in brackets, which may hold brackets."""


def split_names(text: str) -> tuple[str, ...]:
    """Returns the names in a list with commas; commas in brackets belong to a name.

    Raises:
        ConfigError: brackets that do not match.

    Example:
        >>> split_names("fp32, 3lc[s=1.75,entropy=zstd],int8")
        ('fp32', '3lc[s=1.75,entropy=zstd]', 'int8')
        >>> split_names("update[codec=3lc[s=1.5]],fp32")
        ('update[codec=3lc[s=1.5]]', 'fp32')
    """
    if not re.fullmatch(f"{_NAME}(?:,{_NAME})*", text):
        raise ConfigError(f"{text!r}: its brackets do not match; expected names as in fp32,3lc[s=1.75,entropy=zstd]")
    return tuple(name for each in re.findall(_NAME, text) if (name := each.strip()))


def was_given(context: typer.Context, name: str) -> bool:
    """Returns whether the command line gave an option, by its parameter's name, be its value the default's too."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def data_place(path: Path | None) -> Path | None:
    """As `writable`; where data go to standard output, all other text goes to standard error."""
    from thinwire.cli.console import console  # takes rich, which most of --help does without

    console.stderr = path == STANDARD_OUTPUT
    return path if console.stderr else writable(path)


Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        dir_okay=False,
        writable=True,
        callback=data_place,
        help="Write what was printed as data, to this file; - is standard output, and all else is then printed on "
        "standard error.",
    ),
]
Shape = Annotated[str | None, typer.Option(help="Shape this process's traffic inside its transport: a rate.")]
Events = Annotated[bool, typer.Option("--events", help="Report in JSON lines on standard output.")]
Checkpoint = Annotated[
    Path | None, typer.Option(dir_okay=False, help="Write a checkpoint to this file; the one before stays beside it.")
]
CheckpointEvery = Annotated[
    int, typer.Option(min=1, help="Exchanges between two checkpoints: steps, where every step has one.")
]
CHECKPOINT_EVERY = 100
MinWorkers = Annotated[
    int | None, typer.Option(min=1, help="Go on without workers that die while so many are left; with fewer, wait.")
]
WorkerGrace = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1e6,
        help="How long to wait for a worker whose connection broke, in seconds; 0 ends the training at the first "
        "break. By default 10 with --min-workers, else 60.",
    ),
]
NEWEST, AUTO = "newest", "auto"


def resume_from(text: str | None) -> str | None:
    """Checks the value of `--resume`: `newest` (the default value), `auto`, or a step of at least 1."""
    if text is None or text in (NEWEST, AUTO) or (text.isascii() and text.isdecimal() and int(text) > 0):
        return text
    raise typer.BadParameter(f"{text!r}; give nothing, auto (resume where there is a checkpoint) or a step, as in =500")


Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="[=auto|STEP]",
        callback=resume_from,
        help="Go on from the newest checkpoint; from that of a step; or, with auto, only where there is one.",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(dir_okay=False, envvar="THINWIRE_TLS_CERT", help="This process's certificate, a PEM file."),
]
TlsKey = Annotated[
    Path | None, typer.Option(dir_okay=False, envvar="THINWIRE_TLS_KEY", help="Its private key, a PEM file.")
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        envvar="THINWIRE_TLS_CA",
        help="Who signed the other end's certificate, a PEM file; a server with it asks workers for one.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        envvar="THINWIRE_TOKEN_FILE",
        help="Secrets, one a line, TOKEN or rank=3 TOKEN; a worker must show one of the server's.",
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Go without certificate and token where other machines can connect.")
]
Workers = Annotated[int, typer.Option(min=1, help="How many workers train together.")]
