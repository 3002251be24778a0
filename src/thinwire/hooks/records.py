"""Step records for metrics writers: of a worker's tables at every step, of a hook's tensors at measured steps.

A hook's step is measured from its first gradients on, and recorded when the next one begins, because every thread has
finished the step by then. Other steps have no extra counting. Parameters that FSDP gathers are in the report alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, SupportsFloat

from thinwire.cautions import caution
from thinwire.collective.core import Collective
from thinwire.collective.tally import Tally, total
from thinwire.collective.trained import TrainedTensor
from thinwire.errors import ConfigError
from thinwire.runtime.collective import CollectiveDriver
from thinwire.runtime.metrics import MetricsWriter
from thinwire.schema import Merged
from thinwire.telemetry import StepRecord
from thinwire.worker.costs import StepCost
from thinwire.worker.model import WorkerModel
from thinwire.worker.table import WorkerTable

LAG_WARNING = 100.0
"""Steps of updates in a residual: 2–4 are normal at s = 1, 11–31 at 1.75; far more: the learning rate is too high."""
_WEIGHT = 0.1
"""The weight of a measured step in the running mean of norms, so that one easy batch does not look like a lag."""
Totals = Callable[[], dict[str, Any]]
_PHASES = ("encode_seconds", "decode_seconds", "wait_seconds")


def residual_ratios(model: WorkerModel) -> dict[str, float]:
    """Returns, per table, ‖residual‖ over a gradient's norm: the number of steps withheld.

    The unit is the running mean of the gradients' norms, so that one easy batch does not look like a lag.
    """
    ratios = {}
    for table, gradient in model.gradients():
        if (norm := table.residual_norm) is not None:
            unit = table.gradient_norm or float(gradient.float().norm())
            ratios[table.spec.name] = norm / unit if unit else 0.0
    return ratios


class StepRecords:
    """Gives metrics writers the records of one rank.

    Args:
        writers: closed with the records.
        rank: of this process.
        totals: returns a record's `taken`, `wire_nbytes` and `plain_nbytes`.
    """

    def __init__(self, writers: Sequence[MetricsWriter], rank: int, totals: Totals) -> None:
        self._writers, self._rank, self._totals = writers, rank, totals
        self._newest = -1

    def _write(self, record: StepRecord) -> None:
        for writer in self._writers:
            writer.record(record)

    def record_scores(self, step: int, loss: SupportsFloat | None, accuracy: SupportsFloat | None) -> None:
        """Records a step's scores. Raises ConfigError if one is neither a number nor a tensor with one value."""
        scores = _number("loss", loss), _number("accuracy", accuracy)
        self._write(StepRecord.of_scores(step, self._rank, time.time(), *scores))

    def record_merge(self, step: int, merge: Merged) -> None:
        """Records a version that came while a step was taken, and the learners whose contributions it holds."""
        learners = tuple(zip(merge.ranks, merge.steps, merge.weights, strict=True))
        record = StepRecord(step=step, table="", numel=0, rank=self._rank, time_s=time.time())
        self._write(replace(record, version=merge.version, learners=learners))

    def close(self) -> None:
        """Records the totals of all steps, and closes the metrics writers."""
        if self._newest >= 0:
            self._write(StepRecord(step=self._newest, table="", numel=0, rank=self._rank, **self._totals()))
        for writer in self._writers:
            writer.close()


class Recorder(StepRecords):
    """Records every table of a worker at every step, and warns once of a long lag.

    Whether a step changed a table is known when its update has come, so records are written when the next step ends.

    Args:
        metrics, rank, totals: of `StepRecords`; without writers it records no steps.
    """

    def __init__(self, metrics: Sequence[MetricsWriter], rank: int, totals: Totals) -> None:
        super().__init__(metrics, rank, totals)
        self._warned = False
        self._waiting: list[tuple[WorkerTable, StepRecord]] = []

    def begin(self, model: WorkerModel) -> None:
        """Resets the costs: those so far are of joining."""
        for table in (table for tensor in model.tensors for table in tensor.tables):
            table.cost = StepCost()

    def record(self, step: int, model: WorkerModel) -> None:
        """Records one step, and resets the tables' costs for the next."""
        if not self._writers:
            return
        self._send()
        ratios = residual_ratios(model)
        self._warn_of_lag(ratios)
        now, self._newest = time.time(), step
        self._write(StepRecord(step=step, table="", numel=0, rank=self._rank, time_s=now, **self._totals()))
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

    def close(self) -> None:
        self._send()
        super().close()

    def _send(self) -> None:
        for table, record in self._waiting:
            self._write(replace(record, skipped=record.step not in table.changed_in))
            table.changed_in = {step for step in table.changed_in if step > record.step}
        self._waiting.clear()

    def _warn_of_lag(self, ratios: dict[str, float]) -> None:
        if not self._warned and any(ratio > LAG_WARNING for ratio in ratios.values()):
            self._warned = True
            worst = max(ratios, key=lambda name: ratios[name])
            caution(
                f"{worst}: {ratios[worst]:.0f} steps of updates wait in its residual; a smaller learning rate or "
                "sparsity multiplier would let them through"
            )


class ExchangeRecords(StepRecords):
    """Records every tensor of a hook, and the whole step, at every `every`-th step.

    Args:
        writers, rank, totals: of `StepRecords`.
        core, driver: of the exchange.
        every: steps from one measured step to the next.

    Attributes:
        written: number of recorded steps.

    Raises:
        ConfigError: `every` is below 1.
    """

    def __init__(
        self,
        writers: Sequence[MetricsWriter],
        rank: int,
        totals: Totals,
        core: Collective,
        driver: CollectiveDriver,
        every: int,
    ) -> None:
        if every < 1:
            raise ConfigError(f"every={every}; a step in {every} cannot be recorded, take 1 or more")
        super().__init__(writers, rank, totals)
        self._core, self._driver, self._every = core, driver, every
        self._step = self._skipped = self.written = 0
        self._tally: Tally | None = None
        self._before: Mapping[str, float] = {}
        self._norms: dict[str, float] = {}

    def next_step(self, step: int, skipped: int, link_bps: float) -> None:
        """Records the step that has ended, if it was measured, and measures the next one, if due.

        Args:
            step: the next step.
            skipped: number of steps skipped so far.
            link_bps: of the slowest link, as measured last; 0 if it was not measured.
        """
        if self._tally is not None and step == self._step:
            return  # the step is being measured, and has not begun
        self.end_step(step, skipped, link_bps)
        if step % self._every == 0:
            self._tally = self._core.tally = Tally()
            self._step, self._before, self._skipped = step, self._driver.counters(), skipped

    def end_step(self, step: int, skipped: int, link_bps: float) -> None:
        """Records the step before `step`, if it was measured; drops a measurement of `step`, which has not begun."""
        self._newest = step - 1
        if self._tally is not None and step != self._step:
            self._record(self._tally, link_bps, skipped=skipped > self._skipped)
        self._tally = self._core.tally = None

    def _record(self, tally: Tally, link_bps: float, *, skipped: bool) -> None:
        now, core = time.time(), self._core
        self.written += 1
        pushed, pulled = total(tally.pushed), total(tally.pulled)
        units = {} if skipped else self._running_norms(tally)
        # A rank that owns all tensors sends no gradient and receives no average, but codes the averages.
        compressed = bool(tally.pushed or tally.pulled or tally.squares)
        for name, tensor in core.residuals.tensors.items():
            own = sum(part.numel for part in core.residuals.partitions[name] if part.server == core.residuals.rank)
            share = 1 - (own / max(1, tensor.numel) if compressed else 1 / core.residuals.world)
            ring = int(tensor.nbytes * share)
            norm = self._residual_norm(tensor)
            self._write(
                StepRecord(
                    step=self._step,
                    table=name,
                    numel=tensor.numel,
                    rank=self._rank,
                    codec=self._codec(tensor) if compressed else "uncompressed",
                    payload_bytes_push=int(pushed[name]) if compressed else ring,
                    payload_bytes_pull=int(pulled[name]) if compressed else ring * core.pulls,
                    residual_norm=norm,
                    residual_lag=None if norm is None or name not in units else norm / units[name],
                    skipped=skipped,
                    time_s=now,
                    itemsize=tensor.dtype.itemsize,
                    ways=1 + core.pulls,
                    share=share,
                )
            )
        sums = self._driver.counters()
        encode_s, decode_s, wait_s = (sums.get(name, 0.0) - self._before.get(name, 0.0) for name in _PHASES)
        self._write(
            StepRecord(
                step=self._step,
                table="",
                numel=0,
                rank=self._rank,
                encode_s=encode_s,
                decode_s=decode_s,
                wait_s=wait_s,
                time_s=now,
                link_bps=link_bps or None,
                **self._totals(),
            )
        )

    def _running_norms(self, tally: Tally) -> dict[str, float]:
        """Returns the running means of the norms of the codecs' inputs, by tensor, except zeros."""
        for name, square in total(tally.squares).items():
            if math.isfinite(square) and square > 0:
                before = self._norms.get(name, math.sqrt(square))
                self._norms[name] = before + _WEIGHT * (math.sqrt(square) - before)
        return self._norms

    def _residual_norm(self, tensor: TrainedTensor) -> float | None:
        residuals = self._core.residuals
        held = [residuals.contexts.get((tensor.name, part)) for part in residuals.partitions[tensor.name]]
        norms = [float(each.residual.norm()) for each in held if each is not None and each.residual is not None]
        return math.hypot(*norms) if norms else None

    def _codec(self, tensor: TrainedTensor) -> str:
        """Returns the id of the pushes' codec; for a tensor that this rank owns completely, of the averages' codec."""
        residuals = self._core.residuals
        sent = [part for part in residuals.partitions[tensor.name] if part.server != residuals.rank]
        chosen = [each.codec for part in sent if (each := residuals.contexts.get((tensor.name, part))) is not None]
        return (chosen[0] if chosen else tensor.choice.up).id


def _number(name: str, score: SupportsFloat | None) -> float | None:
    """Returns a score as a number, or None. Raises ConfigError if it is not one value."""
    if score is None:
        return None
    shape = tuple(getattr(score, "shape", ()))
    if not hasattr(score, "__float__") or math.prod(shape) != 1:
        of = f" of shape {shape}" if shape else ""
        raise ConfigError(f"{name} is a {type(score).__name__}{of}; expected a number, or a tensor with one value")
    return float(score.item() if hasattr(score, "item") else score)  # torch warns of float(loss)
