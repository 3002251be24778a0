"""Results in a JSON file: for each run its job, its machine and its outcome.

Comparisons and benchmarks write the file after every run, and find earlier runs in it. A new file replaces the old one
only when complete. One process at a time writes to it.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar, Union

import msgspec
import numpy as np
import torch

from thinwire.errors import ConfigError
from thinwire.version import VERSION

FORMAT = 1
_NUMBERS = {word: float(word) for word in ("NaN", "Infinity", "-Infinity")}
"""JSON has no such numbers, so files hold them as words; a training that has diverged reports them."""

R = TypeVar("R", bound=msgspec.Struct)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the versions of a run; `threads` are torch's in the process that stored the run."""

    processor: str
    system: str
    python: str
    torch: str
    numpy: str
    threads: int
    thinwire: str

    @property
    def text(self) -> str:
        """The machine and the versions, for readers of a page."""
        return f"{self.processor}, {self.system}, torch {self.torch}, thinwire {self.thinwire}"


class Run(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """One job's outcome; `job` is the job in JSON and identifies the run."""

    job: dict[str, Any]
    machine: Machine
    outcome: R


class _File(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    format: int
    runs: list[Run[R]] = []


class Results(Generic[R]):
    """Outcomes by job, in a file."""

    def __init__(self, path: Path | None, kinds: Sequence[type[R]], *, fresh: bool = False) -> None:
        # The new file replaces the old one by a move, which would remove a device.
        if path is not None and os.path.exists(path) and not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path} is no regular file: name one")
        self._path = path
        stored = path is not None and not fresh and os.path.exists(path)
        self.runs: list[Run[R]] = read_runs(path, kinds) if stored and path is not None else []

    def find(self, job: Mapping[str, Any]) -> R | None:
        """Returns the outcome of a job, or None if no run of it is stored."""
        return next((run.outcome for run in self.runs if run.job == job), None)

    def add(self, job: Mapping[str, Any], outcome: R) -> None:
        """Stores the outcome of a job on this machine, in place of an earlier one."""
        earlier = [run for run in self.runs if run.job != job]
        self.runs = [*earlier, Run(job=dict(job), machine=machine(), outcome=outcome)]

    def join(self, runs: Sequence[Run[R]]) -> int:
        """Adds runs of jobs that are not stored yet; returns how many."""
        lacking = [run for run in runs if self.find(run.job) is None]
        self.runs += lacking
        return len(lacking)

    def save(self, sections: Mapping[str, Any]) -> None:
        """Writes the file, with further `sections` before the runs, and makes its folder."""
        if self._path is None:
            return
        try:
            path = Path(os.path.realpath(self._path))  # a symbolic link stays; its target is written
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(path, sections)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error.strerror}. Choose another place") from error

    def _write(self, path: Path, sections: Mapping[str, Any]) -> None:
        whole = msgspec.to_builtins({"format": FORMAT, **sections, "runs": self.runs}, str_keys=True)
        # A line for each run: json's indentation takes thirty times as long, after every run.
        text = ",\n".join(f"{json.dumps(name)}: {_lines(value, name == 'runs')}" for name, value in whole.items())
        new = path.with_suffix(".json.new")
        try:
            new.write_text(f"{{\n{text}\n}}\n")
            os.replace(new, path)
        finally:
            with suppress(OSError):
                new.unlink(missing_ok=True)


def _lines(value: Any, in_words: bool) -> str:
    """Returns JSON with a line for each item of a list; NaN and infinity become words, or null."""

    def text(each: Any) -> str:
        try:
            return json.dumps(each, allow_nan=False)
        except ValueError:
            return json.dumps(_spelled(each, in_words), allow_nan=False)

    return "[\n" + ",\n".join(map(text, value)) + "\n]" if isinstance(value, list) and value else text(value)


def _spelled(value: Any, in_words: bool) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value) if in_words else None
    if isinstance(value, dict):
        return {key: _spelled(each, in_words) for key, each in value.items()}
    return [_spelled(each, in_words) for each in value] if isinstance(value, (list, tuple)) else value


def _read(value: Any) -> Any:
    """Replaces the words of NaN and infinity by the numbers."""
    if isinstance(value, str):
        return _NUMBERS.get(value, value)
    if isinstance(value, dict):
        return {key: _read(each) for key, each in value.items()}
    return [_read(each) for each in value] if isinstance(value, list) else value


def read_runs(path: Path, kinds: Sequence[type[R]]) -> list[Run[R]]:
    """Returns the runs of a file."""
    try:
        text = path.read_text()
        data = json.loads(text)
        if any(f'"{word}"' in text for word in _NUMBERS):
            data = _read(data)
        version = data["format"]
        if version == FORMAT:
            kind: Any = Union[tuple(kinds)]  # noqa: UP007  # of a sequence, which X | Y cannot spell
            file: _File[R] = msgspec.convert(data, _File[kind], str_keys=True)
            return file.runs
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Choose another place") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} does not hold results of this kind, or is damaged; choose another place") from error
    raise ConfigError(f"{path} has format {version!r}, expected {FORMAT}; choose another place")


def machine() -> Machine:
    """Returns this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return Machine(
        processor=next(names, platform.machine()),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        numpy=np.__version__,
        threads=torch.get_num_threads(),
        thinwire=VERSION,
    )
