"""Cells that run a job: trainings in one process, and seconds per step by the modelled clock."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import msgspec

from thinwire.engines.events import Event
from thinwire.engines.roles import OnEvent
from thinwire.planner.transport_costs import TransportCosts
from thinwire.quantities import seconds_text
from thinwire_lab.jobs import in_process, modelled
from thinwire_lab.jobs.events import Progress
from thinwire_lab.jobs.history import HistoryRecorder, StepHistory
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.training_loop import OnStep
from thinwire_lab.studies.reproduce.entry import Cell, Finding, OnProgress, Scale
from thinwire_lab.workloads.data import is_here

Pair = tuple[str, str]  # the names of a model and of a data set, as a `jobs.job.Job` takes them

SMALL: Pair = ("mlp", "digits")


def stand_in(scale: Scale, *pairs: Pair, small: Pair = SMALL) -> Pair:
    """Returns the model and the data that replace a paper's: the first pair with installed data.

    At the scale `tiny`, and without installed data, it is the small pair, so that every study runs on every machine.
    """
    return small if scale == "tiny" else next((pair for pair in pairs if is_here(pair[1])), small)


class JobCell(Cell, frozen=True, kw_only=True):
    """Base class; fields with a name of `jobs.job.Job` are those of the job."""

    def job(self, **more: Any) -> Job:
        own = {name: getattr(self, name) for name in self.__struct_fields__ if name in Job.__dataclass_fields__}
        return Job(**own | more)


def following(on_progress: OnProgress) -> OnEvent:
    """Returns a callback for the events of a job with a number of steps, which reports its progress."""

    def on_event(process: str, event: Event) -> None:
        if isinstance(event, Progress) and event.steps:
            on_progress(event.step / event.steps, f"step {event.step:,}, loss {event.loss:.3f}")

    return on_event


T = TypeVar("T", bound="TrainingFinding")


class TrainingFinding(Finding, frozen=True, kw_only=True):
    """The results of a training."""

    evaluations: list[tuple[int, float]]  # pairs of a step and the test accuracy, 0 … 1, the last one at the end
    bits_push: float  # payload bits a value over the whole run, all tensors
    bits_pull: float  # payload bits a value over the whole run, all tensors
    compression_ratio: float
    lag: float  # the largest residual at the end, in units of one step's update
    lr: float  # the largest learning rate
    batch: int  # examples per worker and step
    history: StepHistory  # step by step

    @property
    def accuracy(self) -> float:
        """The test accuracy at the end, 0 … 1."""
        return self.evaluations[-1][1]

    def extended(self, kind: type[T], **more: Any) -> T:
        """Returns a finding of a larger kind: this one with `more` fields."""
        return kind(**msgspec.structs.asdict(self), **more)


class TrainingCell(JobCell, frozen=True, kw_only=True):
    """One training."""

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

    def run(self, on_progress: OnProgress) -> TrainingFinding:
        return train(self, on_progress)


def train(cell: TrainingCell, on_progress: OnProgress, *, on_step: OnStep | None = None) -> TrainingFinding:
    """Makes one training; `on_step` is called after each step of each worker."""
    recorder = HistoryRecorder()
    outcome = in_process.run(cell.job(), on_event=following(on_progress), history=recorder, on_step=on_step)
    evaluations = [(point.step, point.accuracy) for point in outcome.curve if point.step < outcome.steps]
    return TrainingFinding(
        evaluations=[*evaluations, (outcome.steps, outcome.test_accuracy)],
        bits_push=outcome.bits_per_value_push,
        bits_pull=outcome.bits_per_value_pull,
        compression_ratio=outcome.compression_ratio,
        lag=max(outcome.residual_ratio.values(), default=0.0),
        lr=outcome.lr,
        batch=outcome.batch,
        history=recorder.history(),
    )


_COSTS = TransportCosts()
MESSAGES = (
    f"The costs of a gRPC message are set: {seconds_text(_COSTS.server_message_s)} and {1e9 * _COSTS.byte_s:g} ns a "
    f"byte at a server, and {seconds_text(_COSTS.latency_s)} on the way; at a worker they are not counted."
)


class TimingFinding(Finding, frozen=True, kw_only=True):
    """Seconds per step by the modelled clock."""

    seconds_per_step: float


class TimingCell(JobCell, frozen=True, kw_only=True):
    """One short training on a link."""

    finding = TimingFinding

    design: str
    model: str
    data: str
    workers: int
    link: str
    steps: int
    lr: float | None = None
    seed: int = 0

    def run(self, on_progress: OnProgress) -> TimingFinding:
        outcome = modelled.run(self.job(), on_event=following(on_progress))
        return TimingFinding(seconds_per_step=outcome.seconds_per_step)
