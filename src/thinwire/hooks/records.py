"""What is recorded of a step: how far residuals lag, and what every table cost, for the metrics writers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import SupportsFloat

from thinwire.cautions import caution
from thinwire.hooks.scores import number
from thinwire.runtime.metrics import MetricsWriter
from thinwire.telemetry import StepRecord
from thinwire.worker.costs import StepCost
from thinwire.worker.model import WorkerModel
from thinwire.worker.table import WorkerTable

LAG_WARNING = 100.0
"""Steps of updates waiting in a residual: 2–4 are normal at s = 1, 11–31 at 1.75; far more is a rate too high."""


def residual_ratios(model: WorkerModel) -> dict[str, float]:
    """Returns, per table, ‖residual‖ in units of a gradient's norm: how many steps are waiting.

    The unit is the running mean of the gradients' norms, so that one easy batch does not look like a lag.
    """
    ratios = {}
    for table, gradient in model.gradients():
        if (norm := table.residual_norm) is not None:
            unit = table.gradient_norm or float(gradient.float().norm())
            ratios[table.spec.name] = norm / unit if unit else 0.0
    return ratios


class Recorder:
    """Gives every metrics writer a record of every table at every step, and warns once of a lag that is too long.

    Whether a step changed a table is known when its update has come: records leave when the next step ends.

    Args:
        metrics: closed with the recorder; without any, nothing is recorded.
        rank: of this worker.
    """

    def __init__(self, metrics: Sequence[MetricsWriter], rank: int) -> None:
        self._metrics, self._rank = metrics, rank
        self._warned = False
        self._waiting: list[tuple[WorkerTable, StepRecord]] = []

    def begin(self, model: WorkerModel) -> None:
        """Forgets what joining the training has cost."""
        for table in (table for tensor in model.tensors for table in tensor.tables):
            table.cost = StepCost()

    def record(self, step: int, model: WorkerModel) -> None:
        """Records one step, and resets the tables' costs for the next."""
        if not self._metrics:
            return
        self._send()
        ratios = residual_ratios(model)
        self._warn_of_lag(ratios)
        now = time.time()
        for tensor in model.tensors:
            for table in [] if tensor.state else tensor.tables:
                record = StepRecord(
                    step=step,
                    table=table.spec.name,
                    numel=table.values.numel(),
                    rank=self._rank,
                    codec="" if table.context is None else table.context.codec.id,
                    staleness=table.staleness,
                    residual_norm=table.residual_norm,
                    residual_lag=ratios.get(table.spec.name),
                    time_s=now,
                    itemsize=tensor.parameter.element_size(),
                    **asdict(table.cost),
                )
                self._waiting.append((table, record))
                table.cost = StepCost()

    def record_scores(self, step: int, loss: SupportsFloat | None, accuracy: SupportsFloat | None) -> None:
        """Records what belongs to a step as a whole."""
        record = StepRecord.of_scores(step, self._rank, time.time(), number("loss", loss), number("accuracy", accuracy))
        for writer in self._metrics:
            writer.record(record)

    def close(self) -> None:
        """Sends what waits and closes the metrics writers."""
        self._send()
        for writer in self._metrics:
            writer.close()

    def _send(self) -> None:
        for table, record in self._waiting:
            record = replace(record, skipped=record.step not in table.changed_in)
            table.changed_in = {step for step in table.changed_in if step > record.step}
            for writer in self._metrics:
                writer.record(record)
        self._waiting.clear()

    def _warn_of_lag(self, ratios: dict[str, float]) -> None:
        if not self._warned and any(ratio > LAG_WARNING for ratio in ratios.values()):
            self._warned = True
            worst = max(ratios, key=lambda name: ratios[name])
            caution(
                f"{worst}: {ratios[worst]:.0f} steps of updates wait in its residual; a smaller learning rate or "
                "sparsity multiplier would let them through"
            )
