"""Output of all commands: one console, tables, JSON files, pictures, errors."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import rich.table
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape

from thinwire.cli.outputs import STANDARD_OUTPUT
from thinwire.engines.events import Event
from thinwire.errors import ConfigError, ThinwireError
from thinwire.presentation.charts import Chart, draw
from thinwire.presentation.tables import Table
from thinwire.presentation.whole_files import printable, write_file


class Interrupted(ThinwireError):
    """Ctrl-C has ended a command that has a message of its own."""


class _Errors(Console):
    """Standard error. A command continues quietly after the reader of its pipe has gone."""

    def on_broken_pipe(self) -> None:
        """Rich calls it where the pipe has no reader; its own method ends the process."""
        self.quiet = True
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # its buffered text would fail again


console = Console(width=None if sys.stdout is not None and sys.stdout.isatty() else 140)
"""A pipe or a file has no width."""
errors = _Errors(stderr=True)
WIDEST = 10_000
"""Columns, more than any terminal has."""


def write_json(path: Path | None, data: object) -> None:
    """Writes `data` to `path`, if there is one, and prints that. NaN and infinity, which JSON lacks, become null.

    Args:
        path: of the file, whose folder is made; or standard output.
        data: JSON values, dataclasses and structs.

    Raises:
        ConfigError: the file cannot be written, or standard output is closed.
    """
    if path is None:
        return
    # Not by json, which writes NaN.
    text = msgspec.json.format(msgspec.json.encode(_printable(msgspec.to_builtins(data))), indent=2) + b"\n"
    if path != STANDARD_OUTPUT:
        write_file(path, text)
        say_wrote(path)
    elif sys.stdout is None:
        raise ConfigError("--json -: standard output is closed; open it, or give --json a file")
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(text)  # JSON is UTF-8, whatever a terminal shows
        sys.stdout.buffer.flush()


def _printable(value: Any) -> Any:
    """Returns data with all texts made valid UTF-8, such as names of files."""
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def say_wrote(path: Path) -> None:
    """Prints that a file was written; markup in its name stays text."""
    console.print(f"wrote {path}", markup=False, soft_wrap=True)


def drop_output() -> None:
    """Redirects standard output to nothing: its buffered text would fail once more at the end."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


class Told:
    """Prints progress lines. When standard output fails, the run continues after one error line."""

    def __init__(self) -> None:
        self._ended = False

    def __call__(self, line: str) -> None:
        """Prints a line without markup."""
        if self._ended:
            return
        try:
            # Rich ends the process where a pipe has no reader. Beside `--json -`, lines go to standard error.
            print(line, flush=True, file=sys.stderr if console.stderr else sys.stdout)
        except OSError as error:
            self._ended = True
            if not console.stderr:
                drop_output()
                with suppress(OSError):
                    said = f"standard output takes no more lines ({error.strerror}); all else goes on"
                    errors.print(said, markup=False)


@contextmanager
def busy(text: str) -> Iterator[Callable[[str], None]]:
    """Shows a text on a terminal while the block runs, and yields a function that changes it."""
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(escape(text)) as status:
        yield lambda text: status.update(escape(text))


def save_picture(chart: Chart, path: Path) -> None:
    """Draws a chart, writes it to `path` and prints that. Raises ConfigError where it cannot be written."""
    draw(chart, path)
    say_wrote(path)


def report(event: Event) -> None:
    """Writes an event as a line of JSON on standard output, for the process that started this one."""
    sys.stdout.write(event.line() + "\n")
    sys.stdout.flush()


def table(given: Table) -> rich.table.Table:
    """Returns a table for the terminal: figures stay whole, heads and names break between words."""
    shown = rich.table.Table(title=given.title and escape(given.title), title_justify="left")
    for at, (name, *cells) in enumerate(zip(given.header, *given.lines, strict=True)):
        if at < given.left:
            shown.add_column(escape(name), overflow="fold")
        else:
            width = max(map(cell_len, [*cells, *name.split(), " "]))
            head = textwrap.fill(name, width, break_long_words=False, break_on_hyphens=False)
            shown.add_column(escape(head), justify="right", no_wrap=True)
    for line in given.lines:
        shown.add_row(*map(escape, line))
    return shown


def show(given: Table) -> None:
    """Prints a table; where its figures have no room, one line for each cell."""
    shown = table(given)
    room = console.options.update_width(WIDEST)  # rich cuts measured widths to the terminal's
    if console.measure(shown, options=room).minimum <= console.width:
        console.print(shown)
        return
    cells = (
        "\n".join(": ".join(filter(None, each)) for each in zip(given.header, line, strict=True))
        for line in given.lines
    )
    text = "\n\n".join(filter(None, [given.title, *cells]))
    console.print(text, markup=False, highlight=False, soft_wrap=True)
