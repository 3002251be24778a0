"""Training runs as cells: in one process, with loss, accuracy, bits, bytes and lag kept step by step.

Seconds of such runs say nothing, and are not kept.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import msgspec

from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.history import HistoryRecorder, StepHistory
from thinwire_lab.jobs.training_loop import OnStep
from thinwire_lab.studies.reproduce.entry import Finding, OnProgress
from thinwire_lab.studies.reproduce.job_cells import JobCell, following

T = TypeVar("T", bound="TrainingFinding")


class TrainingFinding(Finding, frozen=True, kw_only=True):
    """What a training came to.

    Attributes:
        evaluations: pairs of a step and the test accuracy, 0 … 1, the last one at the end.
        bits_push, bits_pull: payload bits a value over the whole run, all tensors.
        lag: the largest residual at the end, in units of one step's update.
        lr: the largest learning rate.
        batch: examples per worker and step.
        history: step by step.
    """

    evaluations: list[tuple[int, float]]
    test_loss: float
    bits_push: float
    bits_pull: float
    compression_ratio: float
    lag: float
    lr: float
    batch: int
    weights: str
    history: StepHistory

    @property
    def accuracy(self) -> float:
        """The test accuracy at the end, 0 … 1."""
        return self.evaluations[-1][1]

    def grown(self, kind: type[T], **more: Any) -> T:
        """Returns a finding of a larger kind: what this training came to, and `more`."""
        return kind(**msgspec.structs.asdict(self), **more)


class TrainingCell(JobCell, frozen=True, kw_only=True):
    """One training."""

    timed = False
    finding: ClassVar[type[TrainingFinding]] = TrainingFinding

    design: str
    model: str
    data: str
    workers: int
    steps: int
    eval_steps: int
    batch: int | None = None
    lr: float | None = None
    seed: int = 0

    def __str__(self) -> str:
        where = f"{self.model} on {self.data}, {self.workers} workers, {self.steps:,} steps"
        return f"{self.design}, {where}, seed {self.seed}"

    def run(self, on_progress: OnProgress) -> TrainingFinding:
        """Makes the training."""
        return train(self, on_progress)


def train(cell: TrainingCell, on_progress: OnProgress, *, on_step: OnStep | None = None) -> TrainingFinding:
    """Makes one training; `on_step` is called after each step of each worker."""
    recorder = HistoryRecorder()
    outcome = in_process.run(cell.job(), on_event=following(on_progress), history=recorder, on_step=on_step)
    evaluations = [(point.step, point.accuracy) for point in outcome.curve if point.step < outcome.steps]
    return TrainingFinding(
        evaluations=[*evaluations, (outcome.steps, outcome.test_accuracy)],
        test_loss=outcome.test_loss,
        bits_push=outcome.bits_per_value_push,
        bits_pull=outcome.bits_per_value_pull,
        compression_ratio=outcome.compression_ratio,
        lag=max(outcome.residual_ratio.values(), default=0.0),
        lr=outcome.lr,
        batch=outcome.batch,
        weights=outcome.weights,
        history=recorder.history(),
    )
