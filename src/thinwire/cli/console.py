"""What all commands print with: one console, tables, JSON files, errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thinwire.errors import ConfigError

console = Console(width=None if sys.stdout.isatty() else 140)
"""In a pipe or a file there is no terminal to fit."""
errors = Console(stderr=True)


def write_json(path: Path | None, data: Any) -> None:
    """Writes `data` to `path`, if there is one, and says so.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(data, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another --json file") from error
        console.print(f"wrote {path}")


def event(data: dict[str, Any]) -> None:
    """Writes one JSON line on standard output, for whoever started this process."""
    sys.stdout.write(json.dumps(data) + "\n")
    sys.stdout.flush()


def size(nbytes: float) -> str:
    """A number of bytes for people.

    >>> size(1234567)
    '1.23 MB'
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def runs_table(runs: list[dict[str, Any]], title: str) -> Table:
    """One column for each run, one row for each figure."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(escape(run["design"]), justify="right")
    first = runs[0]["seconds_per_step"]
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("steps", lambda r: f"{r['steps']:,}"),
        ("seconds per step", lambda r: f"{r['seconds_per_step']:.4f}"),
        *([("speed-up", lambda r: f"{first / r['seconds_per_step']:.1f}×")] if len(runs) > 1 else []),
        ("test accuracy", lambda r: f"{r['test_accuracy']:.2%}"),
        ("train loss", lambda r: f"{r['train_loss']:.4f}"),
        ("payload up / down", lambda r: f"{size(r['payload_bytes_push'])} / {size(r['payload_bytes_pull'])}"),
        ("wire up / down", lambda r: f"{size(r['wire_bytes_push'])} / {size(r['wire_bytes_pull'])}"),
        ("bits per value up / down", lambda r: f"{r['bits_per_value_push']:.3f} / {r['bits_per_value_pull']:.3f}"),
        ("compression ratio", lambda r: f"{r['compression_ratio']:.1f}×"),
        ("link, shaped by", lambda r: f"{r['link']}, {r['shaping']}"),
    ]
    for name, figure in rows:
        table.add_row(name, *(figure(run) for run in runs))
    return table
