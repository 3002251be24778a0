"""Makes one measurement and keeps its result, which is finished only for the present sources and commands.

In the folder, `NAME.json` is the result, and `runs/NAME/` has what each command has measured so far.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

import thinwire
import thinwire_lab
from thinwire.engines.roles import own_command
from thinwire.errors import EngineError
from thinwire.presentation.tables import Table
from thinwire.presentation.whole_files import write_file
from thinwire_lab.engines.namespaces import available
from thinwire_lab.engines.system_tools import can_unshare
from thinwire_lab.jobs.results import Machine, machine


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One section of the page.

    Attributes:
        commands: of `thinwire`. `run` starts a script that prints its figures as a line of JSON; they become one line
            of a table, with the options of the command as further columns.
        seeds: the number of seeds with which each command runs; by default the command has no `--seed` added.
        minutes: estimated duration on two idle cores.
        keys: the columns that name a line, `title` for the title of the command's table. Lines with the same keys
            become one, with commas between their figures.
        values: the columns of figures.
        across: a column whose values become columns, each with all figures.
    """

    title: str
    commands: list[str]
    seeds: int = 0
    minutes: int
    keys: list[str]
    values: list[str]
    across: str | None = None
    needs: list[Literal["CUDA", "thin links"]] = []

    def all_commands(self) -> list[str]:
        """Returns the commands with their seeds."""
        seeds = [f" --seed {seed}" for seed in range(self.seeds)] or [""]
        return [command + seed for command in self.commands for seed in seeds]

    def lacking(self) -> str | None:
        """Returns why this machine cannot make the measurement, if it cannot."""
        if "CUDA" in self.needs and not torch.cuda.is_available():
            return "torch finds no CUDA device here"
        possible, why = available() if "thin links" in self.needs else (True, "")
        return None if possible or can_unshare() else why


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The tables and notes of one measurement's commands, with their origin; `seconds` of the last start alone."""

    commands: list[str]
    sources: str
    commit: str
    date: str
    machine: Machine
    cores: int
    finished: bool = False
    seconds: float = 0.0
    tables: list[Table] = []
    notes: list[str] = []


def catalogue() -> dict[str, Measurement]:
    """Returns the measurements by name."""
    text = Path(__file__).with_name("catalogue.toml").read_text()
    return msgspec.toml.decode(text, type=dict[str, Measurement])


def sources() -> str:
    """Returns a digest of both packages' Python files, without those of this package, which only arrange results."""
    found, here = hashlib.sha256(), Path(__file__).parent
    for package in (thinwire, thinwire_lab):
        [root] = map(Path, package.__path__)
        for path in sorted(root.rglob("*.py")):
            if here not in path.parents:
                found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def stored(path: Path, given: Measurement) -> Result | None:
    """Returns the stored result of a measurement, finished or not, if it has the same commands."""
    result = msgspec.json.decode(path.read_bytes(), type=Result) if path.exists() else None
    return result if result and result.commands == given.all_commands() else None


def make(given: Measurement, path: Path) -> None:
    """Makes what a measurement's result lacks.

    Raises:
        EngineError: a command has failed; what has finished is kept.
    """
    result, runs, digest = stored(path, given), path.parent / "runs" / path.stem, sources()
    if result is None or result.sources != digest:
        shutil.rmtree(runs, ignore_errors=True)
    elif result.finished:
        return
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    result = Result(
        commands=given.all_commands(),
        sources=digest,
        commit=subprocess.run(describe, capture_output=True, text=True).stdout.strip(),
        date=date.today().isoformat(),
        machine=machine(),
        cores=os.cpu_count() or 1,
    )
    _store(path, result)
    began = time.monotonic()
    made = [_measure(shlex.split(each), runs / f"{number}.json") for number, each in enumerate(result.commands)]
    ended = {
        "tables": msgspec.convert([table for each in made for table in each["tables"]], list[Table]),
        "notes": [note for each in made for note in each.get("notes", ())],
        "seconds": time.monotonic() - began,
    }
    _store(path, msgspec.structs.replace(result, finished=True, **ended))


def _store(path: Path, result: Result) -> None:
    write_file(path, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def _measure(command: Sequence[str], path: Path) -> dict[str, Any]:
    """Runs one command, which continues where `path` or the folder beside it has results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if command[0] == "compare":
        _run([*command, "--out", str(path.with_suffix("")), "--json", str(path)])
    elif command[0] != "run":
        _run([*command, "--json", str(path), "--resume"])
    elif not path.exists():
        line = figures(command, _run(command, capture=True))
        write_file(path, msgspec.json.encode({"tables": [Table(list(line), [list(line.values())])]}))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _run(arguments: Sequence[str], *, capture: bool = False) -> str:
    process = subprocess.Popen(own_command(*arguments), stdout=subprocess.PIPE if capture else None, text=True)
    try:
        output, _ = process.communicate()
    except KeyboardInterrupt:
        process.wait()  # Ctrl-C has reached it too: it keeps its results and ends its processes
        raise
    if process.returncode:
        raise EngineError(f"`thinwire {shlex.join(arguments)}` ended with status {process.returncode}")
    return output or ""


def figures(command: Sequence[str], output: str) -> dict[str, str]:
    """Returns the options of a script's command and the figures that it printed, as cells of a line.

    >>> figures(["run", "--link", "1gbit"], '{"loss": 1.62345, "steps": 20}\\nsent by each rank: 3 MB, 4 MB')
    {'link': '1gbit', 'loss': '1.623', 'steps': '20', 'sent': '3 MB'}
    """
    printed = output.splitlines()
    found = json.loads(next(line for line in printed if line.startswith("{")))
    sent = next(line.partition(": ")[2] for line in printed if line.startswith("sent by each rank"))
    options = {name[2:]: value for name, value in pairwise(command) if name.startswith("--") and name != "--"}
    numbers = {name: f"{value:.4g}" for name, value in found.items() if isinstance(value, int | float)}
    return options | numbers | {"sent": sent.partition(",")[0]}
