"""A training that was recorded: its step records, and its outcome where there is one."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from thinwire.errors import ConfigError
from thinwire.runtime.record_files import RecordFile
from thinwire.studies.step_figures import Figures, RecordedSteps
from thinwire.telemetry import StepRecord

MOST_OUTCOME_NBYTES = 1 << 26


class _Point(msgspec.Struct):
    seconds: float
    accuracy: float


class _Outcome(msgspec.Struct):
    """What a page shows of a run's outcome; see `jobs.outcome.RunOutcome`, which has more."""

    design: str
    model: str
    data: str
    workers: int
    link: str
    steps: int
    seed: int
    curve: list[_Point]
    test_accuracy: float


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What is known of a training.

    Attributes:
        name: of the file or folder.
        recorded: its step records.
        files: that records were read from.
        damaged: lines in them that are no records.
        outcome: the run's, if it was found.
        outcome_file: that it was read from.
    """

    name: str
    recorded: RecordedSteps
    files: tuple[Path, ...]
    damaged: int
    outcome: _Outcome | None = None
    outcome_file: Path | None = None

    def figures(self) -> Figures:
        """Returns the figures, with the outcome's accuracy where records have none."""
        figures = self.recorded.figures()
        if figures.accuracy is None and self.outcome is not None:
            figures = replace(figures, accuracy=self.outcome.test_accuracy)
        return figures

    def accuracies(self) -> list[tuple[float, float]]:
        """Returns test accuracies over the seconds of training."""
        if self.outcome is not None and self.outcome.curve:
            return [(point.seconds, point.accuracy) for point in self.outcome.curve]
        return [(seconds, accuracy) for _, seconds, accuracy in self.recorded.scores("accuracy")]


def read_run(path: Path) -> RecordedRun:
    """Reads a file of step records, or those of a folder with the run's outcome.

    Args:
        path: what `--telemetry` wrote, or a folder with it. Files in a folder are of one run: `*.jsonl` are records,
            and a `*.json` that `train --json` wrote is the outcome.

    Raises:
        ConfigError: there is no such file, or no record in it.
    """
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or folder; expected what --telemetry wrote")
    files = [RecordFile(each) for each in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    recorded, numbers = RecordedSteps(), dict.fromkeys(files, 0)
    # By time, as in one file: ranks that began again in files of their own are then of one run, and not of one each.
    for file, record in heapq.merge(*(_named(each) for each in files), key=lambda each: each[1].time_s):
        numbers[file] += 1
        recorded.add(record)
    if not recorded.steps:
        looked = "no *.jsonl in it has a step record" if path.is_dir() else "it has no step record"
        raise ConfigError(f"{path}: {looked}; expected the JSON lines that --telemetry writes")
    outcomes = {each: _outcome(each) for each in sorted(path.glob("*.json"))} if path.is_dir() else {}
    outcome_file = next((each for each, outcome in outcomes.items() if outcome is not None), None)
    return RecordedRun(
        name=path.resolve().name,
        recorded=recorded,
        files=tuple(each.path for each, number in numbers.items() if number),
        outcome_file=outcome_file,
        damaged=sum(each.damaged for each, number in numbers.items() if number),
        outcome=None if outcome_file is None else outcomes[outcome_file],
    )


def _named(file: RecordFile) -> Iterator[tuple[RecordFile, StepRecord]]:
    return ((file, record) for record in file.read(ended=True))


def _outcome(path: Path) -> _Outcome | None:
    try:
        if path.stat().st_size > MOST_OUTCOME_NBYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=_Outcome)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError):
        return None  # of something else
