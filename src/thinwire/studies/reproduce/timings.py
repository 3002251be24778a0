"""Seconds per step on thin links as cells, by the modelled clock: real cores and bytes, computed links.

Every worker and the server has a processor of its own, as on a cluster, and so a run says what ten machines would take
that are as fast as this one. Nothing here is measured on a link, and its columns say so.
"""

from __future__ import annotations

from thinwire.jobs import modelled
from thinwire.studies.reproduce.entry import Finding, OnProgress
from thinwire.studies.reproduce.job_cells import JobCell, following


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

    def __str__(self) -> str:
        return f"{self.design}, {self.model}, {self.workers} workers, {self.link}, {self.steps:,} timed steps"

    def run(self, on_progress: OnProgress) -> TimingFinding:
        """Makes the run."""
        outcome = modelled.run(self.job(), on_event=following(on_progress))
        return TimingFinding(seconds_per_step=outcome.seconds_per_step)
