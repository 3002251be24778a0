"""Output of all commands: one console, tables, JSON files, pictures, errors."""

from __future__ import annotations

import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import rich.table
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from thinwire.cli.outputs import STANDARD_OUTPUT
from thinwire.engines.events import Event
from thinwire.errors import ConfigError, ThinwireError
from thinwire.presentation.charts import Chart, draw
from thinwire.presentation.tables import Table
from thinwire.presentation.whole_files import printable, write_file


class Interrupted(ThinwireError):
    """Ctrl-C has ended a command, which has more to say of it than that it was interrupted."""


class _Errors(Console):
    """Standard error. A command goes on quietly when the reader of its pipe has gone."""

    def on_broken_pipe(self) -> None:
        """Is called where the pipe has no reader. Rich's own ends the process."""
        self.quiet = True
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # what it still holds has no place to go


console = Console(width=None if sys.stdout is not None and sys.stdout.isatty() else 140)
"""A pipe or a file has no width."""
errors = _Errors(stderr=True)
WIDEST = 10_000
"""Columns of no terminal."""
PROGRESS_S = 10.0
"""From one line of progress to the next, where there is no terminal."""


def write_json(path: Path | None, data: object) -> None:
    """Writes `data` to `path`, if there is one, and says so. NaN and infinity, which JSON has not, become null.

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
    """Returns data whose texts UTF-8 can hold, such as names of files."""
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def say_wrote(path: Path) -> None:
    """Says that a file was written; its name may hold what would be markup."""
    console.print(f"wrote {path}", markup=False, soft_wrap=True)


def drop_output() -> None:
    """Has standard output lead nowhere: what it still holds has no place to go, and would fail once more at the end."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


class Told:
    """Prints progress lines. When standard output takes no more, the run goes on, and one error line says so."""

    def __init__(self) -> None:
        self._ended = False

    def __call__(self, line: str) -> None:
        """Prints a line as it is."""
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


class Lines:
    """Progress in lines, where there is no terminal for a bar: the first at once, then one every so many seconds."""

    def __init__(self) -> None:
        self._said = -math.inf
        self._tell = Told()

    def say(self, text: str, *, always: bool = False) -> None:
        """Prints a line, if it is time for one.

        Args:
            text: of the line.
            always: whatever the time.
        """
        if not console.is_terminal and (always or time.monotonic() - self._said >= PROGRESS_S):
            self._said = time.monotonic()
            self._tell(text)


def bars(description: str = "{task.description}", *, transient: bool = False) -> Progress:
    """Returns bars with a text and the time; none where there is no terminal, but `Lines`.

    Args:
        description: how a task's is written.
        transient: they are gone afterwards.
    """
    columns = TextColumn(description), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=transient, disable=not console.is_terminal)


@contextmanager
def busy(text: str) -> Iterator[Callable[[str], None]]:
    """Shows what is being done until it is, and gives what changes that; nothing is written without a terminal."""
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(escape(text)) as status:
        yield lambda text: status.update(escape(text))


def save_picture(chart: Chart, path: Path) -> None:
    """Draws a chart, writes it to `path` and says so. Raises ConfigError where it cannot be written."""
    draw(chart, path)
    say_wrote(path)


def report(event: Event) -> None:
    """Writes an event as a line of JSON on standard output, for whoever started this process."""
    sys.stdout.write(event.line() + "\n")
    sys.stdout.flush()


def table(given: Table) -> rich.table.Table:
    """Returns a table as the terminal shows it: figures stay whole, their heads and names break between words."""
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
    """Prints a table; where its figures have no room, every cell on a line of its own."""
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
