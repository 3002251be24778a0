"""Seconds per step on thin links as cells, by the modelled clock: real cores and bytes, computed links.

Every worker and the server has a processor of its own, as on a cluster, and so a run says what ten machines would take
that are as fast as this one. Nothing here is measured on a link, and its columns say so.
"""

from __future__ import annotations

from thinwire.engines.events import Event
from thinwire.jobs import modelled
from thinwire.jobs.events import Progress
from thinwire.jobs.job import Job
from thinwire.studies.reproduce.entry import Cell, Finding, OnProgress


class TimingCell(Cell, frozen=True, kw_only=True):
    """One short training on a link; fields are those of `jobs.job.Job`."""

    design: str
    model: str
    data: str
    workers: int
    link: str
    steps: int
    lr: float | None = None
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.design}, {self.model}, {self.workers} workers, {self.link}, {self.steps:,} timed steps"

    def job(self) -> Job:
        """Returns the run."""
        return Job(**{name: getattr(self, name) for name in self.__struct_fields__})


class TimingFinding(Finding, frozen=True, kw_only=True):
    """Seconds per step by the modelled clock."""

    seconds_per_step: float


def time(cell: TimingCell, on_progress: OnProgress) -> TimingFinding:
    """Makes one run."""

    def on_event(process: str, event: Event) -> None:
        if isinstance(event, Progress):
            on_progress(event.step / cell.steps, f"step {event.step:,}")

    return TimingFinding(seconds_per_step=modelled.run(cell.job(), on_event=on_event).seconds_per_step)
