"""A training that was recorded: its step records, and its outcome where there is one."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from thinwire.cautions import caution
from thinwire.errors import ConfigError
from thinwire.quantities import counted
from thinwire.reports.step_figures import Figures, RecordedSteps
from thinwire.runtime.record_files import RecordFile
from thinwire.telemetry import StepRecord

MOST_OUTCOME_NBYTES = 1 << 26
SAME_AGE_S = 1.0
"""Files that were written within it are of one age: copies keep whole seconds, or none."""


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
    test_accuracy: float | None
    lost_workers: int = 0


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What is known of a training.

    Attributes:
        name: of the file or folder.
        recorded: its step records.
        files: that records were read from.
        damaged: lines in them that are no records.
        outcome: the run's, if one was found that fits the records.
        outcome_file: that it was read from.
        outcome_files: all in which there is the outcome of some run.
        remark: why none of them is the run's; empty where one is, or none is there.
    """

    name: str
    recorded: RecordedSteps
    files: tuple[Path, ...]
    damaged: int
    outcome: _Outcome | None = None
    outcome_file: Path | None = None
    outcome_files: tuple[Path, ...] = ()
    remark: str = ""

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
        path: what `--telemetry` wrote, or a folder with it. Records in a folder, `*.jsonl`, are of one run. Of what
            `train --json` wrote there, `*.json`, the newest that fits them is the outcome; where none does, or
            several do that are of one age, a warning says so.

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
    read = {each: _outcome(each) for each in sorted(path.glob("*.json"))} if path.is_dir() else {}
    outcomes = {each: outcome for each, outcome in read.items() if outcome is not None}
    last_steps, accuracy = recorded.last_steps, recorded.figures().accuracy if outcomes else None
    fitting = [each for each, outcome in outcomes.items() if _fits(outcome, last_steps, accuracy)]
    newest = _newest(fitting, outcomes)
    outcome_file = newest[0] if len(newest) == 1 else None
    remark = "" if outcome_file or not outcomes else _remark(newest or list(outcomes), last_steps, fit=bool(newest))
    if remark:
        caution(f"{path}: {remark}")
    return RecordedRun(
        name=path.resolve().name,
        recorded=recorded,
        files=tuple(each.path for each, number in numbers.items() if number),
        outcome_file=outcome_file,
        outcome_files=tuple(outcomes),
        remark=remark,
        damaged=sum(each.damaged for each, number in numbers.items() if number),
        outcome=None if outcome_file is None else outcomes[outcome_file],
    )


def _fits(outcome: _Outcome, last_steps: Mapping[int, int], accuracy: float | None) -> bool:
    """Whether records may be of the run that came to this: of as many workers and steps, and of its accuracy."""
    # The steps are those of the lowest rank that reached the end: others may have died, or gone on for longer.
    # One that was lost may have recorded something, or nothing.
    counts = (
        outcome.workers - outcome.lost_workers <= len(last_steps) <= outcome.workers
        and outcome.steps - 1 in last_steps.values()
    )
    return counts and (None in (accuracy, outcome.test_accuracy) or accuracy == outcome.test_accuracy)


def _newest(files: list[Path], outcomes: dict[Path, _Outcome]) -> list[Path]:
    """Returns the newest of files, with others of its age that hold something else."""
    written = {each: each.stat().st_mtime for each in files}
    newest = max(written.values(), default=0.0)
    different: list[Path] = []
    for each in files:
        if written[each] > newest - SAME_AGE_S and all(outcomes[each] != outcomes[other] for other in different):
            different.append(each)
    return different


def _remark(files: list[Path], last_steps: Mapping[int, int], *, fit: bool) -> str:
    names = ", ".join(each.name for each in files)
    counts = counted(len(last_steps), "worker"), counted(max(last_steps.values()) + 1, "step")
    of = f"these records of {' and '.join(counts)}"
    if fit:
        return f"No outcome is shown: {names} fit {of} alike, and none is the newest."
    which = "seems to be of another run" if len(files) == 1 else "seem to be of other runs"
    return f"No outcome is shown: {names} {which} than {of}, by workers, steps or accuracy."


def _named(file: RecordFile) -> Iterator[tuple[RecordFile, StepRecord]]:
    return ((file, record) for record in file.read(ended=True))


def _outcome(path: Path) -> _Outcome | None:
    try:
        if path.stat().st_size > MOST_OUTCOME_NBYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=_Outcome)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError):
        return None  # of something else
