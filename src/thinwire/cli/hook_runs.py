"""What `bench hooks` and `bench race` share: a rank's command, lists in words, a bar, and the file of finished runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from thinwire.bench.hook_names import NOTES, hook
from thinwire.cli.console import console
from thinwire.errors import ConfigError
from thinwire.jobs.results import machine

RANK_COMMAND = (sys.executable, "-m", "thinwire.cli.bench_hooks", "hooks-rank")


class Kept:
    """Outcomes, and a JSON file that holds all of them from the moment they are there."""

    def __init__(self, path: Path | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path = path

    def add(self, row: dict[str, Any], **more: Any) -> None:
        """Takes a row, and writes the file anew."""
        self.rows.append(row)
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                data = {"machine": machine(), "cells": self.rows, **more}
                self._path.write_text(json.dumps(data, indent=2) + "\n")
            except OSError as error:
                raise ConfigError(
                    f"{self._path} cannot be written: {error.strerror}. Choose another --json file"
                ) from error

    def tell(self) -> None:
        """Prints the notes on hooks that were run, the errors of those that failed, and where the file is."""
        for name in dict.fromkeys(hook(row["hook"]).id for row in self.rows if row["note"]):
            console.print(f"{name}: {NOTES[name]}", highlight=False)
        for row in self.rows:
            if row["error"] is not None:
                where = f"{row['model']}, {row['link'] or 'unlimited'}, {row['hook']}"
                console.print(escape(f"{where} failed: {last_words(row['error'])}"), style="red", highlight=False)
        if self._path is not None and self.rows:
            console.print(f"wrote {self._path}")


def last_words(error: str) -> str:
    """What a hook died of, for a table; the ranks' tracebacks before it, a screen or two, are in the JSON file.

    >>> last_words("EngineError: rank 1 ended; last lines:\\n    [rank1]: NonFiniteError: w\\nstopped: rank 0")
    '[rank1]: NonFiniteError: w'
    >>> last_words("EngineError: the ranks ended with different models")
    'EngineError: the ranks ended with different models'
    """
    said = [line.strip() for line in error.splitlines() if line.startswith("    ")]  # as the engine quotes a process
    return said[-1] if said else error


def words(text: str) -> list[str]:
    """The words of a list with commas. Raises ConfigError where there are none."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise ConfigError(f"{text!r} names nothing; give names with commas")
    return found


def rates_of(links: str) -> list[str | None]:
    """The rates in a list with commas; None is unlimited."""
    return [None if word in ("none", "unlimited") else word for word in words(links)]


def progress_bar() -> Progress:
    """A bar for many runs, each with a line of its own."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        console=console,
    )
