"""The step records of a training, from a file or from all files of a folder."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.reports.step_figures import RecordedSteps
from thinwire.runtime.record_files import RecordFile
from thinwire.telemetry import StepRecord


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A training's step records.

    Attributes:
        name: of the file or folder.
        recorded: the records.
        files: that records were read from.
        damaged: lines in them that are no records.
    """

    name: str
    recorded: RecordedSteps
    files: tuple[Path, ...]
    damaged: int


def read_run(path: Path) -> RecordedRun:
    """Reads a file of step records, as `--telemetry` writes it, or all `*.jsonl` of a folder, which are of one run.

    Raises:
        ConfigError: there is no such file, or no record in it.
    """
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or folder; expected what --telemetry wrote")
    files = [RecordFile(each) for each in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    recorded, numbers = RecordedSteps(), dict.fromkeys(files, 0)
    # By time, as in one file: ranks that began again in files of their own are then of one run, and not of one each.
    for file, record in heapq.merge(*map(_named, files), key=lambda each: each[1].time_s):
        numbers[file] += 1
        recorded.add(record)
    if not recorded.steps:
        looked = "no *.jsonl in it has a step record" if path.is_dir() else "it has no step record"
        raise ConfigError(f"{path}: {looked}; expected the JSON lines that --telemetry writes")
    read = [file for file, number in numbers.items() if number]
    return RecordedRun(
        name=path.resolve().name,
        recorded=recorded,
        files=tuple(each.path for each in read),
        damaged=sum(each.damaged for each in read),
    )


def _named(file: RecordFile) -> Iterator[tuple[RecordFile, StepRecord]]:
    return ((file, record) for record in file.read(ended=True))
