"""Progress of long commands: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import time

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from thinwire.cli.console import Told, console

PROGRESS_S = 10.0
"""Between two lines of progress."""


class Lines:
    """Prints progress lines where there is no terminal: the first at once, then one every `PROGRESS_S` seconds."""

    def __init__(self) -> None:
        self._said = -math.inf
        self._tell = Told()

    def say(self, text: str, *, always: bool = False) -> None:
        """Prints a line if the last one is old enough, or `always`."""
        if not console.is_terminal and (always or time.monotonic() - self._said >= PROGRESS_S):
            self._said = time.monotonic()
            self._tell(text)


class GridProgress:
    """A bar and lines for a grid's cells, with a bar's text on the current cell."""

    def __init__(self) -> None:
        self.bar = bars(transient=True)
        self._task, self._lines = self.bar.add_task("starting", total=None, text=""), Lines()

    def on_cell(self, number: int, total: int, cell: object) -> None:
        """Shows the next cell; see `jobs.grid.OnCell`."""
        self.bar.update(self._task, completed=number - 1, total=total, description=escape(str(cell)), text="")
        self._lines.say(f"{number}/{total}  {cell}", always=True)

    def tell(self, text: str) -> None:
        """Shows a text on the cell; see `jobs.grid.Tell`."""
        self.bar.update(self._task, text=text)


def bars(description: str = "{task.description}", *, transient: bool = False) -> Progress:
    """Returns bars with a text and the time, which a terminal alone shows; `transient` ones vanish at the end."""
    columns = TextColumn(description), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=transient, disable=not console.is_terminal)
