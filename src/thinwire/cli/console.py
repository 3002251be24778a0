"""What all commands print with: one console, tables, JSON files, pictures, errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import rich.table
from rich.console import Console
from rich.markup import escape

from thinwire.engines.events import Event
from thinwire.errors import ConfigError
from thinwire.jobs.outcome import RunOutcome
from thinwire.jobs.tables import Table, nbytes_text
from thinwire.workloads.models import TEXT_MODELS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

console = Console(width=None if sys.stdout.isatty() else 140)
"""In a pipe or a file there is no terminal to fit."""
errors = Console(stderr=True)


def write_json(path: Path | None, data: object) -> None:
    """Writes `data` to `path`, if there is one, and says so.

    Args:
        path: of the file; its folder is made.
        data: JSON values, dataclasses and structs.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(msgspec.to_builtins(data, str_keys=True), indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another --json file") from error
        console.print(f"wrote {path}")


def save_picture(picture: Figure, path: Path) -> None:
    """Writes a picture to `path` and says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path)
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


def runs_table(runs: Sequence[RunOutcome], title: str) -> Table:
    """Returns a table with one column for each run and one line for each figure."""
    first = runs[0].seconds_per_step
    figures: list[tuple[str, Callable[[RunOutcome], str]]] = [
        ("steps", lambda run: f"{run.steps:,}"),
        ("seconds per step", lambda run: f"{run.seconds_per_step:.4f}"),
        *([("speed-up", lambda run: f"{first / run.seconds_per_step:.1f}×")] if len(runs) > 1 else []),
        ("test accuracy", lambda run: f"{run.test_accuracy:.2%}"),
        *([("held-out nats a byte", lambda run: f"{run.test_loss:.4f}")] if runs[0].model in TEXT_MODELS else []),
        ("train loss", lambda run: f"{run.train_loss:.4f}"),
        ("payload up / down", lambda r: f"{nbytes_text(r.payload_bytes_push)} / {nbytes_text(r.payload_bytes_pull)}"),
        ("wire up / down", lambda run: f"{nbytes_text(run.wire_bytes_push)} / {nbytes_text(run.wire_bytes_pull)}"),
        ("bits per value up / down", lambda run: f"{run.bits_per_value_push:.3f} / {run.bits_per_value_pull:.3f}"),
        ("compression ratio", lambda run: f"{run.compression_ratio:.1f}×"),
        ("link, shaped by", lambda run: f"{run.link}, {run.shaping}"),
    ]
    lines = [[name, *map(figure, runs)] for name, figure in figures]
    return Table(["", *(run.design for run in runs)], lines, title)
