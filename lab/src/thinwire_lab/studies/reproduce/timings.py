"""Seconds per step on thin links as cells, by the modelled clock: real cores and bytes, computed links.

Every worker and the server has a processor of its own, as on a cluster, and so a run says what ten machines would take
that are as fast as this one. What a transport's messages cost is not measured but set, and `MESSAGES` says it. Nothing
here is measured on a link, and its columns say so.
"""

from __future__ import annotations

from thinwire.planner.transport_costs import TransportCosts
from thinwire.quantities import seconds_text
from thinwire_lab.jobs import modelled
from thinwire_lab.studies.reproduce.entry import Finding, OnProgress
from thinwire_lab.studies.reproduce.job_cells import JobCell, following

_COSTS = TransportCosts()
MESSAGES = (
    "What gRPC takes for a message is set, and not measured here: "
    f"{seconds_text(_COSTS.worker_message_s)} of a processor at a worker, {seconds_text(_COSTS.server_message_s)} at a "
    f"server, {1e9 * _COSTS.byte_s:g} ns a byte at either, and {seconds_text(_COSTS.latency_s)} on the way, as on "
    "machine A of docs/benchmarks.md. The shorter a step is, the larger a part of it these are."
)
"""A sentence for whoever shows seconds of the modelled clock, which takes these costs where none are given."""


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
