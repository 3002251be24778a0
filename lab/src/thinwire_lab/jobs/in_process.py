"""One run in one process, for its accuracy: the same weights as with processes, bit for bit, for less work.

Messages and cores are the same; there are no seconds and no bytes on a link. Workers are threads that take turns, as
with the computed clock (`modelled`).
"""

from __future__ import annotations

from torch import nn

from thinwire.engines.roles import OnEvent
from thinwire.errors import ConfigError
from thinwire.transports.links import parse_rate
from thinwire_lab.jobs.history import HistoryRecorder
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.modelled import Cluster
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.jobs.training_loop import OnStep


def run(
    job: Job,
    *,
    on_event: OnEvent = lambda process, event: None,
    history: HistoryRecorder | None = None,
    on_step: OnStep | None = None,
) -> RunOutcome:
    """Trains once; the outcome has `in_process` set and no shaping. Workers' threads make the callbacks."""
    if parse_rate(job.link or "none").bps is not None or job.seconds is not None:
        raise ConfigError("a run in one process has no seconds: leave out the link and the time budget")

    def stepped(rank: int, step: int, loss: float, model: nn.Module) -> None:
        if history is not None:
            history.loss(step, loss)
        if on_step is not None:
            on_step(rank, step, loss, model)

    cluster = Cluster(job, on_event, metrics=() if history is None else (history,), on_step=stepped)
    return cluster.run(shaping="none")
