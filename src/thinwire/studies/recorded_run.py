"""A training that was recorded: its step records, and its outcome where there is one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from thinwire.errors import ConfigError
from thinwire.runtime.record_files import RecordFile
from thinwire.studies.step_figures import Figures, RecordedSteps

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
    recorded, damaged, files = RecordedSteps(), 0, []
    for each in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        file, found = RecordFile(each), False
        for record in file.read(ended=True):
            found = True
            recorded.add(record)
        if found:
            files.append(each)
            damaged += file.damaged
    if not recorded.steps:
        looked = "no *.jsonl in it has a step record" if path.is_dir() else "it has no step record"
        raise ConfigError(f"{path}: {looked}; expected the JSON lines that --telemetry writes")
    outcomes = {each: _outcome(each) for each in sorted(path.glob("*.json"))} if path.is_dir() else {}
    outcome_file = next((each for each, outcome in outcomes.items() if outcome is not None), None)
    return RecordedRun(
        name=path.resolve().name,
        recorded=recorded,
        files=tuple(files),
        outcome_file=outcome_file,
        damaged=damaged,
        outcome=None if outcome_file is None else outcomes[outcome_file],
    )


def _outcome(path: Path) -> _Outcome | None:
    try:
        if path.stat().st_size > MOST_OUTCOME_NBYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=_Outcome)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError):
        return None  # of something else
