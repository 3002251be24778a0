"""Every design on every model for a few steps: does it finish, stay finite, and leave all replicas equal?

Trainings run in one process, with a thread for each worker and shards behind the in-memory transport: their weights
are those of a run with processes. One that fails is reported and the next begins. Nothing is said of accuracy or
speed: the runs are short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.bench.harness import Bench, Figures, Measured, Tell
from thinwire.bench.options import DesignsOptions
from thinwire.errors import ThinwireError
from thinwire.jobs import in_process
from thinwire.jobs.job import Job
from thinwire.policies.designs import designs as list_designs
from thinwire.presentation.tables import Table
from thinwire.workloads.models import TEXT_MODELS
from thinwire.workloads.models import models as list_models

TEXT_DATA = dict.fromkeys(TEXT_MODELS, "python-text")
"""Models that do not train on images."""

WIDER = ("byte-transformer-3m", "byte-transformer-10m")
"""Models that are left out unless named: they are another one, only wider."""


class Trained(Figures, frozen=True, kw_only=True):
    """A training's mean loss over its last steps, and what was wrong with it, if anything."""

    loss: float | None = None
    error: str = ""


@dataclass(kw_only=True)
class DesignsBench(DesignsOptions, Bench[Job, Trained]):
    """Every pair of a design and a model.

    Args:
        designs: by default all.
        models: by default all but `WIDER`.
        data: the data set of the models that see images.
        steps: of each training.
        workers: how many.
        servers: how many shards.

    Raises:
        ConfigError: a pair that cannot be.
    """

    kinds = (Trained,)
    serves = True

    def __post_init__(self) -> None:
        self.designs = self.designs or tuple(list_designs())
        self.models = self.models or [name for name in list_models() if name not in WIDER]
        self.cells()

    def cells(self) -> list[Job]:
        return [
            Job(
                design=design,
                model=model,
                data=TEXT_DATA.get(model, self.data),
                workers=self.workers,
                servers=self.servers,
                steps=self.steps,
            )
            for model in self.models
            for design in self.designs
        ]

    def measure(self, cell: Job, before: Measured[Job, Trained], tell: Tell) -> Trained:
        try:
            loss = in_process.run(cell).train_loss
        except (ThinwireError, ArithmeticError, RuntimeError, ValueError) as error:
            return Trained(error=f"{type(error).__name__}: {error}")
        return Trained(loss=loss, error="" if math.isfinite(loss) else f"loss {loss}")

    def failed(self, figures: Trained) -> bool:
        return figures.error != ""

    def line(self, cell: Job, figures: Trained) -> str:
        return f"{cell.model}, {cell.design}: {figures.error or 'ok'}"

    def tables(self, measured: Measured[Job, Trained]) -> list[Table]:
        """The loss of each pair that did what it should."""
        losses = {
            (job.design, job.model): "FAILED" if run.error or run.loss is None else f"{run.loss:.3f}"
            for job, [run] in measured.items()
        }
        lines = [[design, *(losses.get((design, model), "–") for model in self.models)] for design in self.designs]
        return [Table(["design", *self.models], lines, "training loss, mean of the last steps")]
