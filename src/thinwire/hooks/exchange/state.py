"""The state of a hook between steps: residuals and step for checkpoints, counters for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import torch.distributed as dist

from thinwire.cautions import caution
from thinwire.collective.core import Collective
from thinwire.collective.snapshot import Snapshot
from thinwire.errors import ConfigError
from thinwire.hooks.exchange.auto import ExchangeAuto
from thinwire.hooks.exchange.checkpoints import Checkpoints, Copied
from thinwire.hooks.exchange.options import ExchangeOptions
from thinwire.hooks.exchange.saved import Layout
from thinwire.hooks.guards import StepGuard
from thinwire.hooks.records import ExchangeRecords
from thinwire.policies.auto.levels import Level
from thinwire.runtime.collective import CollectiveDriver
from thinwire.runtime.metrics import MetricsWriter
from thinwire.runtime.peers import measure_link
from thinwire.telemetry import WarmUp
from thinwire.transports.peers import PeerGroup


class ExchangeState(Checkpoints):
    """The state of one rank's hook: keep it, and save `state_dict()` with every checkpoint.

    Args:
        core: this rank's part in the exchange.
        peers: the ranks that exchange. All of them construct a state, which measures the link unless `options` forbid.
        options: of `compress`.
        layouts: of the tensors, by name.
        model: closes the exchange when it is garbage-collected; by default the state does.
        settings: of `codec="auto"`; none with a fixed codec.
        guard: knows the optimizers.
        blocking: whether the backward pass waits for every uncompressed reduction.
        ranks: all ranks of the training; by default the peers.

    Attributes:
        step: steps taken so far; backward passes that only accumulate gradients are part of the next one.
        resumed: the result of the last `load_state_dict`, as text; empty before.
        link_bps: bits per second of the slowest link, as measured at the start; 0 if it was not measured.
        warm_up: the costs of the first steps, which the report leaves out.
        auto: chooses every step's setting; None with a fixed codec.
        gathered: the codec of gathered parameters, as text; empty if they are not coded.
    """

    def __init__(
        self,
        *,
        core: Collective,
        peers: PeerGroup,
        options: ExchangeOptions,
        layouts: Mapping[str, Layout],
        model: object = None,
        settings: tuple[Level, ...] = (),
        guard: StepGuard | None = None,
        blocking: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.core = core
        self.driver = driver = CollectiveDriver(core, peers)
        driver.close_with(self if model is None else model)
        self.start_step = start = options.start_step
        self.auto: ExchangeAuto | None = None
        if settings and guard is not None and peers.size > 1:
            self.auto = ExchangeAuto(
                settings, options.limits, core, driver, guard=guard, start_step=start, blocking=blocking
            )
        self.link_bps = 0.0
        if options.measure_link:
            self.link_bps = measure_link(peers) if self.auto is None else self.auto.measure()
        self._guard, self._layouts = guard, layouts
        self._before: Snapshot | None = None
        numbers = peers.names if ranks is None else ranks
        self._group = " ".join(map(str, numbers)) if len(numbers) < dist.get_world_size() else ""
        self.step = self._first = 0
        self.resumed = ""
        self.gathered = ""
        self.warm_up = WarmUp()
        self._records: ExchangeRecords | None = None
        self._scaler = options.scaler
        self._loss_scale = 1.0 if options.scaler is None else 0.0

    @property
    def everyone(self) -> PeerGroup:
        """The connections to all ranks of the training."""
        return self.driver.peers

    @property
    def steps_skipped(self) -> int:
        """Steps that all ranks skipped because of NaN or Inf in some rank's gradient, and so in all averages."""
        undone = self.auto is not None and self.auto.flush.undone  # the core counts it when the next step begins
        return self.core.steps_skipped + (undone and self.core.skip)

    @property
    def uncompressed_nbytes(self) -> float:
        """Bytes that this rank would send in an uncompressed step, in a ring: 2·(N − 1)/N times the gradients' size."""
        world, tensors = self.core.residuals.world, self.core.residuals.tensors.values()
        return (2 if self.core.pulls else 1) * (world - 1) / world * sum(tensor.nbytes for tensor in tensors)

    @property
    def uncounted_traffic(self) -> str:
        """Other traffic, which the counters leave out, as text."""
        return ""

    @property
    def taken(self) -> int:
        """Steps since the hook was made, uncompressed ones too."""
        return self.step - self._first

    @property
    def known_link_bps(self) -> float:
        """Bits per second of the slowest link, as measured last: at the start, or later by the controller."""
        return (0.0 if self.auto is None else self.auto.controller.memory.link_bps) or self.link_bps

    @property
    def recorded(self) -> int:
        """Number of steps with records in metrics writers."""
        return 0 if self._records is None else self._records.written

    def counters(self) -> dict[str, float]:
        """Returns the sums so far: bytes, values and messages sent, and seconds by purpose."""
        return self.driver.counters()

    def totals(self) -> dict[str, Any]:
        """Returns the bytes sent in all steps so far, and their uncompressed size, for reports and records.

        Uncompressed steps count the same in both.
        """
        sums, plain = self.counters(), self.uncompressed_nbytes
        steps = int(sums.get("steps", 0))
        taken = max(self.taken, steps)
        return {
            "taken": taken,
            "wire_nbytes": sums.get("wire_bytes", 0) + (taken - steps) * plain,
            "plain_nbytes": taken * plain + sums.get("gather_uncompressed_bytes", 0),
        }

    def compressed_sums(self) -> dict[str, float]:
        """Returns `counters()` of compressed steps only, for the report."""
        return self.counters()

    def note_warm_up(self) -> None:
        """Records the costs of the first compressed steps."""
        if not self.warm_up.over:
            sums = self.compressed_sums()
            self.warm_up.note(int(sums.get("steps", 0)), sums)

    def record_to(self, *writers: MetricsWriter, every: int = 10) -> None:
        """Gives metrics writers records of future steps: bytes, residual and lag of every tensor, and the seconds.

        A measured step reads every gradient and residual once more. It is recorded when the next step begins, the last
        one by `close`.

        Args:
            writers: `JsonLines`, `Prometheus` and `TensorBoard` of `thinwire.runtime.metrics`, or your own; closed with
                the state. Ranks of one machine may append to the same file, but need separate ports.
            every: steps from one measured step to the next; `Prometheus` then sums only the measured steps.

        Raises:
            ConfigError: `every` is below 1, or `record_to` was called before.

        Example::

            state = ddp.compress(model, codec="auto")
            state.record_to(JsonLines("steps.jsonl"))      # and in a terminal: thinwire watch steps.jsonl
        """
        if self._records is not None:
            raise ConfigError("record_to was called before: give all metrics writers to one call")
        self._records = ExchangeRecords(writers, self.rank, self.totals, self.core, self.driver, every)
        self.between_steps()

    def record_scores(self, *, loss: SupportsFloat | None = None, accuracy: SupportsFloat | None = None) -> None:
        """Records the latest step's loss, or an accuracy; without `record_to`, it has no effect.

        Args:
            loss: of this rank's training step.
            accuracy: on the test set, 0 … 1.

        Raises:
            ConfigError: neither a number nor a tensor with one value.
        """
        if self._records is not None:
            self._records.record_scores(max(0, self.step - 1), loss, accuracy)

    def between_steps(self) -> None:
        """Adds the step that has ended to warm-up and records, before the first gradients of step `step`."""
        self.note_warm_up()
        if self._records is not None:
            self._records.next_step(self.step, self.steps_skipped, self.known_link_bps)

    def _end_records(self) -> None:
        """Records the step that has ended, if it was measured."""
        if self._records is not None:
            self._records.end_step(self.step, self.steps_skipped, self.known_link_bps)

    def close(self) -> None:
        """Ends the hook's threads and records. The model's backward pass cannot be used afterwards."""
        if self._guard is not None:
            self._guard.close()
        self.driver.close()
        self._end_records()
        if self._records is not None:
            self._records.close()

    def restore_discarded(self) -> None:
        """Undoes the previous exchange for gradients that no optimizer used; before a step changes residuals.

        Residuals are copied before every exchange, once an optimizer has stepped without some of the gradients.
        """
        if self._guard is None or self.core.residuals.world == 1:  # one rank has no residuals
            return
        self.driver.settle()
        if self.auto is not None:
            self.auto.flush.settle()
        unused = self._guard.begin_exchange(skipped=self.steps_skipped)
        if unused.seen and self._before is None:
            self._before = Snapshot(self.core.residuals.contexts)
        if self._before is not None:
            self._before.restore(unused.discarded)
            self._before.take(kept=unused.kept)
        if unused.discarded and self.auto is not None:
            self.auto.flush.expect_all()

    def note_compressed(self) -> None:
        """Records that the step under way is compressed: an optimizer must use its gradients."""
        if self._guard is not None and self.core.residuals.world > 1:
            self._guard.exchanged()

    def __deepcopy__(self, memo: Any) -> Copied:
        """A copy of the model, such as one of averaged weights, has no exchange."""
        return Copied()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickling drops the state, and warns of that."""
        caution(
            f"{type(self).__name__} is being pickled, which drops its residuals: save state.state_dict() instead, with "
            "model.state_dict()"
        )
        return Copied, ()

    def begin_step(self) -> None:
        """Prepares residuals and the setting for step `step`, before the step uses them."""
        self.follow_loss_scale()
        if self.auto is not None:
            self.auto.begin_step(self.step)

    @property
    def compresses(self) -> bool:
        """Whether the step under way is compressed."""
        return self.step >= self.start_step if self.auto is None else self.auto.compressed

    def follow_loss_scale(self) -> None:
        """Scales residuals to the units of this step's gradients, before the step uses them."""
        self.driver.settle()
        if self._scaler is None:
            return
        if self.auto is not None:
            self.auto.settle()  # restores residuals of an undone step, in that step's units
        scale = float(self._scaler.get_scale())
        if self._loss_scale not in (0.0, scale):
            self.core.residuals.scale(scale / self._loss_scale)
            if self._before is not None:
                self._before.scale(scale / self._loss_scale)
        if scale < self._loss_scale and self._guard is not None:
            self._guard.forget()  # the scaler has skipped the previous step, perhaps for an overflow on another rank
        self._loss_scale = scale
