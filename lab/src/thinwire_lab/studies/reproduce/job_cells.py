"""Cells whose run is a job: fields of theirs are the job's, and the steps that it reports are progress."""

from __future__ import annotations

from typing import Any

from thinwire.engines.events import Event
from thinwire.engines.roles import OnEvent
from thinwire_lab.jobs.events import Progress
from thinwire_lab.jobs.job import Job
from thinwire_lab.studies.reproduce.entry import Cell, OnProgress


class JobCell(Cell, frozen=True, kw_only=True):
    """Base class; every field that has the name of one of `jobs.job.Job` is that one."""

    def job(self, **more: Any) -> Job:
        """Returns the run.

        Args:
            more: fields of the job that the cell lacks, or that are to be others than the cell's.

        Raises:
            ConfigError: choices that cannot be, or not together.
        """
        own = {name: getattr(self, name) for name in self.__struct_fields__ if name in Job.__dataclass_fields__}
        return Job(**own | more)


def following(on_progress: OnProgress) -> OnEvent:
    """Returns what takes the events of a job with a number of steps, and tells how far it is."""

    def on_event(process: str, event: Event) -> None:
        if isinstance(event, Progress) and event.steps:
            on_progress(event.step / event.steps, f"step {event.step:,}, loss {event.loss:.3f}")

    return on_event
