"""Cells that run a job: trainings in one process, and seconds per step by the modelled clock."""

from __future__ import annotations

from typing import Any, ClassVar

from thinwire.engines.events import Event
from thinwire.engines.roles import OnEvent
from thinwire.planner.transport_costs import TransportCosts
from thinwire.quantities import seconds_text
from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.events import Progress
from thinwire_lab.jobs.grid import Tell
from thinwire_lab.jobs.history import HistoryRecorder, StepHistory
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.jobs.training_loop import OnStep
from thinwire_lab.studies.reproduce.entry import Cell, Finding, Scale
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

    model: str
    data: str
    workers: int
    seed: int = 0

    def job(self, **more: Any) -> Job:
        own = {name: getattr(self, name) for name in self.__struct_fields__ if name in Job.__dataclass_fields__}
        return Job(**own | more)


def following(tell: Tell) -> OnEvent:
    """Returns a callback for the events of a job with a number of steps, which tells its progress."""

    def on_event(process: str, event: Event) -> None:
        if isinstance(event, Progress) and event.steps:
            tell(f"step {event.step:,} of {event.steps:,}, loss {event.loss:.3f}")

    return on_event


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


class TrainingCell(JobCell, frozen=True, kw_only=True):
    """One training."""

    finding: ClassVar[type[TrainingFinding]] = TrainingFinding

    design: str
    steps: int
    eval_steps: int
    batch: int | None = None
    lr: float | None = None

    def run(self, tell: Tell) -> TrainingFinding:
        return train(self, tell)


def train(cell: JobCell, tell: Tell, *, on_step: OnStep | None = None) -> TrainingFinding:
    """Makes one training; `on_step` is called after each step of each worker."""
    recorder = HistoryRecorder()
    outcome = in_process.run(cell.job(), on_event=following(tell), metrics=[recorder], on_step=on_step)
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


class TimedFinding(Finding, frozen=True, kw_only=True):
    """The results of a short run."""

    seconds_per_step: float  # without the first step
    wire_bytes: float  # of packets, a step, at the server's link, both ways together, the first weights included
    shaping: str  # `modelled`, `kernel`, `application`, or `none`

    @classmethod
    def of(cls, outcome: RunOutcome) -> TimedFinding:
        return cls(
            seconds_per_step=outcome.seconds_per_step,
            wire_bytes=(outcome.wire_bytes_push + outcome.wire_bytes_pull) / outcome.steps,
            shaping=outcome.shaping,
        )


class TimingCell(JobCell, frozen=True, kw_only=True):
    """One short training on a link, by the modelled clock."""

    finding = TimedFinding

    design: str
    link: str
    steps: int
    lr: float | None = None

    def run(self, tell: Tell) -> TimedFinding:
        return TimedFinding.of(in_process.run(self.job(), on_event=following(tell)))
