"""Step records of the hooks of equal ranks: what every tensor cost in the steps that are measured.

A step is measured from its first gradients on, and recorded when the next one begins: by then every thread is done with
it. Between two measured steps nothing is counted that the report does not count as well; what FSDP gathers is for the
report alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, SupportsFloat

from thinwire.collective.core import Collective
from thinwire.collective.residuals import TrainedTensor
from thinwire.collective.tally import Tally, total
from thinwire.errors import ConfigError
from thinwire.hooks.scores import number
from thinwire.runtime.collective import CollectiveDriver
from thinwire.runtime.metrics import MetricsWriter
from thinwire.telemetry import StepRecord

_WEIGHT = 0.1
"""Of a measured step in the running mean of norms, so that one easy batch does not look like a lag."""


class Recorded(Protocol):
    """What is asked of a hook's state."""

    core: Collective
    driver: CollectiveDriver
    step: int

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def steps_skipped(self) -> int:
        """Steps that no rank took because of NaN or Inf."""
        ...

    @property
    def known_link_bps(self) -> float:
        """Bits per second of the slowest link, as measured last; 0 where it was not."""
        ...


class ExchangeRecords:
    """Gives metrics writers a record of every tensor, and one of the step as a whole, at every so-manieth step.

    Args:
        state: of the hook.
        writers: closed with the state.
        every: steps from one measured step to the next.

    Raises:
        ConfigError: `every` is below 1.
    """

    def __init__(self, state: Recorded, writers: Sequence[MetricsWriter], every: int) -> None:
        if every < 1:
            raise ConfigError(f"every={every}; a step in {every} cannot be recorded, take 1 or more")
        self._state, self._writers, self._every = state, writers, every
        self._step = 0
        self._tally: Tally | None = None
        self._before: Mapping[str, float] = {}
        self._skipped = 0
        self._norms: dict[str, float] = {}

    def next_step(self, step: int) -> None:
        """Records the step that is over, if it was measured, and measures the one to come, if it is its turn."""
        tally, core = self._tally, self._state.core
        if tally is not None and step == self._step:
            return  # it is measured, and has not begun
        if tally is not None:
            self._record(tally)
        self._tally = core.tally = Tally() if step % self._every == 0 else None
        if self._tally is not None:
            state = self._state
            self._step, self._before, self._skipped = step, state.driver.counters(), state.steps_skipped

    def record_scores(self, step: int, loss: SupportsFloat | None, accuracy: SupportsFloat | None) -> None:
        """Records what belongs to a step as a whole."""
        scores = number("loss", loss), number("accuracy", accuracy)
        self._write(StepRecord.of_scores(step, self._state.rank, time.time(), *scores))

    def end_step(self) -> None:
        """Records the step that is over, if it was measured; the one to come, which has not begun, is forgotten.

        Call it before a state is loaded, and `next_step` afterwards.
        """
        if self._tally is not None and self._state.step > self._step:
            self._record(self._tally)
        self._tally = self._state.core.tally = None

    def close(self) -> None:
        """Records the last step and closes the writers."""
        self.end_step()
        for writer in self._writers:
            writer.close()

    def _record(self, tally: Tally) -> None:
        state, now = self._state, time.time()
        core = state.core
        skipped = state.steps_skipped > self._skipped
        pushed, pulled = total(tally.pushed), total(tally.pulled)
        lags = {} if skipped else self._lags(tally)
        for name, tensor in core.residuals.tensors.items():
            # The owner of everything sends no gradient and receives no average, but codes the averages.
            compressed = bool(tally.pushed or tally.pulled or tally.squares)
            parts = core.residuals.partitions[name]
            own = sum(part.numel for part in parts if part.server == core.residuals.rank)
            share = 1 - (own / max(1, tensor.numel) if compressed else 1 / core.residuals.world)
            ring = int(tensor.nbytes * share)
            norm = self._residual_norm(tensor)
            self._write(
                StepRecord(
                    step=self._step,
                    table=name,
                    numel=tensor.numel,
                    rank=state.rank,
                    codec=self._codec(tensor) if compressed else "uncompressed",
                    payload_bytes_push=int(pushed[name]) if compressed else ring,
                    payload_bytes_pull=int(pulled[name]) if compressed else ring * core.pulls,
                    residual_norm=norm,
                    residual_lag=None if norm is None or name not in lags else norm / lags[name],
                    skipped=skipped,
                    time_s=now,
                    itemsize=tensor.dtype.itemsize,
                    ways=1 + core.pulls,
                    share=share,
                )
            )
        sums = state.driver.counters()

        def spent(name: str) -> float:
            return sums.get(name, 0.0) - self._before.get(name, 0.0)

        self._write(
            StepRecord(
                step=self._step,
                table="",
                numel=0,
                rank=state.rank,
                encode_s=spent("encode_seconds"),
                decode_s=spent("decode_seconds"),
                wait_s=spent("wait_seconds"),
                time_s=now,
                link_bps=state.known_link_bps or None,
            )
        )

    def _lags(self, tally: Tally) -> dict[str, float]:
        """Returns the running mean of the norm of what every tensor's codecs were given, where it is not 0."""
        for name, square in total(tally.squares).items():
            if math.isfinite(square) and square > 0:
                before = self._norms.get(name, math.sqrt(square))
                self._norms[name] = before + _WEIGHT * (math.sqrt(square) - before)
        return self._norms

    def _residual_norm(self, tensor: TrainedTensor) -> float | None:
        residuals = self._state.core.residuals
        held = [residuals.contexts.get((tensor.name, part)) for part in residuals.partitions[tensor.name]]
        norms = [float(each.residual.norm()) for each in held if each is not None and each.residual is not None]
        return math.hypot(*norms) if norms else None

    def _codec(self, tensor: TrainedTensor) -> str:
        """The codec of pushes in words; a tensor that only this rank averages has that of averages."""
        residuals, fixed = self._state.core.residuals, tensor.choice.up
        held = {part.server: residuals.contexts.get((tensor.name, part)) for part in residuals.partitions[tensor.name]}
        chosen = [each.codec for owner, each in held.items() if each is not None and owner != residuals.rank]
        return (chosen[0] if chosen else fixed).id

    def _write(self, record: StepRecord) -> None:
        for writer in self._writers:
            writer.record(record)
