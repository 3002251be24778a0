"""What all commands print with: one console, tables, JSON files, pictures, errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import rich.table
from rich.console import Console
from rich.markup import escape

from thinwire.engines.events import Event
from thinwire.errors import ConfigError
from thinwire.jobs.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

console = Console(width=None if sys.stdout.isatty() else 140)
"""In a pipe or a file there is no terminal to fit."""
errors = Console(stderr=True)


def write_json(path: Path | None, data: object) -> None:
    """Writes `data` to `path`, if there is one, and says so. NaN and infinity, which JSON has not, become null.

    Args:
        path: of the file; its folder is made.
        data: JSON values, dataclasses and structs.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # msgspec's own JSON, for it writes null where json would write NaN, which most readers refuse.
            path.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another --json file") from error
        console.print(f"wrote {path}")


def save_picture(picture: Figure, path: Path) -> None:
    """Writes a picture to `path` and says so. Raises ConfigError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another file for the picture") from error
    console.print(f"wrote {path}")


def report(event: Event) -> None:
    """Writes an event as a line of JSON on standard output, for whoever started this process."""
    sys.stdout.write(event.line() + "\n")
    sys.stdout.flush()


def show(table: Table) -> None:
    """Prints a table."""
    shown = rich.table.Table(title=table.title and escape(table.title), title_justify="left")
    for index, name in enumerate(table.header):
        shown.add_column(escape(name), justify="left" if index < table.left else "right", overflow="fold")
    for line in table.lines:
        shown.add_row(*map(escape, line))
    console.print(shown)
