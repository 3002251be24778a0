"""The events that servers and workers report to their launcher."""

from __future__ import annotations

from thinwire.engines.events import Event, Listening, Served
from thinwire_lab.jobs.outcome import CurvePoint, WorkerOutcome


class Progress(Event, frozen=True, kw_only=True):
    """Worker 0 has taken `step` of `steps` steps, None with a time budget, in `seconds`."""

    step: int
    steps: int | None
    seconds: float
    loss: float


class Accuracy(Event, frozen=True, kw_only=True):
    """Worker 0 has evaluated the model; if it was lost, the lowest remaining rank, at the end."""

    step: int
    seconds: float
    accuracy: float

    def point(self) -> CurvePoint:
        """Returns the point of the run's curve."""
        return CurvePoint(step=self.step, seconds=self.seconds, accuracy=self.accuracy)


class Checkpointed(Event, frozen=True, kw_only=True):
    """A worker has written its checkpoint of a step."""

    rank: int
    step: int


class Done(Event, frozen=True, kw_only=True):
    """A worker has ended its training."""

    outcome: WorkerOutcome


KINDS = (Listening, Served, Progress, Accuracy, Checkpointed, Done)
