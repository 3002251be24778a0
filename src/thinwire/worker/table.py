"""One table of one shard at a worker: accumulates and encodes gradients, and applies updates.

Values are encoded and decoded on the device where the tensor is. Only gradients that accumulate for a later push wait
in the host's memory (`accumulated.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from thinwire.cautions import caution
from thinwire.codecs import CheckedFrame, Codec, Context, StepOptions, open_parsed
from thinwire.codecs.tensors import FloatArray, flatten, off_host
from thinwire.errors import ConfigError, ProtocolError
from thinwire.frames import Flags, Frame, pack, parse
from thinwire.optimizers.outer_momentum import OuterMomentum
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.policies.assignment import Partition
from thinwire.policies.compression import NARROW, is_batched
from thinwire.policies.criteria import Criterion, Pending
from thinwire.schema import TableSpec
from thinwire.states import Count, Finite, read
from thinwire.telemetry import Counters
from thinwire.worker.accumulated import Accumulated
from thinwire.worker.apply_buffer import Update
from thinwire.worker.costs import StepCost, count_pulls, count_pushes

NO_GRADIENT = b""
NORM_EVERY = 8
"""The norm of one in so many gradients is computed, unless each is recorded: it costs a pass over them."""

LocalStep = Callable[["WorkerTable", torch.Tensor, Update], None]
"""Runs the worker's own optimizer on one table: the average gradient, and the update that brought it, for its rates."""


class SavedTable(msgspec.Struct, frozen=True):
    """The part of a table's `state_dict` beside its context's."""

    accumulated: torch.Tensor | None = None
    accumulated_iterations: Count = 0
    accumulated_squares: Finite = 0.0
    squares: Finite = 0.0
    num_observed: Count = 0


class WorkerTable:
    """A table of one shard at a worker.

    Args:
        partition: which values of the tensor they are, and the shard that holds them.
        index: the table's, in the shard's plan.
        spec: name and shape.
        values: the worker's copy, float32 in the table's shape, a view of the tensor's.
        codec: of the pushes; None for buffers, which travel as they are.
        counters: for bytes and seconds.
        now: returns a time in seconds.
        seed: of the codec's random stream.
        revocable: whether a push may have no effect, so that its residual must be restored; may be set later.
        measures: whether steps are recorded: the norm of every gradient, and which steps changed the copy.
        momentum: that each end adds to what is sent; 0: none.

    Attributes:
        context: encodes the pushes; None for buffers.
        step_options: what the codec is to know of this step: the scale that workers share, or the gradients' root mean
            square.
        cost: of the step under way.
        staleness: how many updates the copy lacks.
        gradient_norm: the running mean of the gradients' norms.
        size: number of values.
        span: which values of the tensor they are.
        counters: as given.
        outer: what this end adds to the copy; None where no end adds anything.
        travels_in_batch: whether its values may travel in a message's batch.
        on_host: whether its values lie in the host's memory.
        changed_in: the steps that changed the copy, until they are recorded; kept only where steps are.
    """

    def __init__(
        self,
        partition: Partition,
        index: int,
        spec: TableSpec,
        values: torch.Tensor,
        codec: Codec | None,
        counters: Counters,
        now: Callable[[], float],
        *,
        seed: int,
        revocable: bool,
        measures: bool,
        momentum: float = 0.0,
    ) -> None:
        self.outer = OuterMomentum(momentum) if momentum else None
        self.shard, self.index, self.spec, self.values = partition.server, index, spec, values
        self.size = values.numel()
        self.context: Context | None = None
        if codec is not None:
            self.context = codec.context(values, name=spec.name, seed=seed)
        self.step_options: StepOptions = {}
        self.cost, self.staleness = StepCost(), 0
        self.gradient_norm = 0.0
        self.changed_in: set[int] = set()
        self.span = slice(partition.start, partition.stop)
        self.on_host = not off_host(values)
        self._observes = codec is not None and "rms" in codec.scheme.step_options
        self._observed_squares, self._num_observed = 0.0, 0
        self.travels_in_batch = codec is not None and is_batched(codec, spec.shape)
        self.counters, self._now = counters, now
        self.revocable, self.measures = revocable, measures
        self._pushed_at = now()
        self._residual_before: torch.Tensor | None = None
        self._accumulated = self._accumulated_before = Accumulated()

    @property
    def array(self) -> FloatArray:
        """The worker's copy in the host's memory: a view, or a copy where it is on a GPU."""
        array: FloatArray = self.values.cpu().numpy()
        return array

    @property
    def residual(self) -> torch.Tensor | None:
        """The values that the pushes so far left unsent, float32[n]; None where they keep no residual."""
        return None if self.context is None or self.context.residual is None else self.context.residual.view(-1)

    @property
    def residual_norm(self) -> float | None:
        """2-norm of what the pushes so far left unsent; None where they keep no residual."""
        return None if self.residual is None else float(self.residual.norm())

    def part_of(self, gradient: torch.Tensor) -> torch.Tensor:
        """This table's values of a tensor's gradient, in the table's shape."""
        if tuple(gradient.shape) == self.spec.shape:
            return gradient
        return gradient.reshape(-1)[self.span].reshape(self.spec.shape)

    # ---- up

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Adds a gradient to a later push. Raises NonFiniteError before anything is changed."""
        if not self.on_host:
            caution(
                "the consistency policy accumulates gradients, which it does in the host's memory: every gradient on "
                f"{self.values.device.type} is copied there whole (4 bytes a value), and the sum back to be encoded"
            )
        self._accumulated = self._accumulated.plus(gradient, self.spec.name)

    def encode(self, gradient: torch.Tensor | None, criterion: Criterion | None) -> EncodedTensor:
        """Returns this step's push: what accumulated, and `gradient`. Empty where there is nothing to send.

        Raises:
            NonFiniteError: NaN or Inf; the residual and the accumulated gradients are unchanged.
        """
        assert self.context is not None
        if criterion is not None and gradient is not None:
            self.accumulate(gradient)
            gradient, waiting = None, self._accumulated
            assert waiting.sum is not None
            seconds = self._now() - self._pushed_at
            if not criterion.send(Pending(waiting.sum, self.array, waiting.iterations, waiting.squares, seconds)):
                return NO_GRADIENT
        waiting = self._accumulated
        if gradient is not None and waiting.sum is not None:
            waiting = waiting.plus(gradient, self.spec.name)
        total = gradient if waiting.sum is None else torch.from_numpy(waiting.sum)
        if total is None:
            return NO_GRADIENT
        [total] = prepare_all([self], [total])
        begin = self._now()
        frame: EncodedTensor
        if self.travels_in_batch and self.on_host:  # what `context.encode` does, for values that travel in a batch
            flat = flatten(total, self.spec.name)
            self.context.check(flat)
            frame = BatchedTensor.of(flat.values, self.spec.name, narrow=self.context.codec == NARROW)
            self.context.sent(len(frame))
        else:
            frame = self.context.encode(total, **self.step_options)
        self.encoded(self._now() - begin)
        return frame

    def observe(self, gradient: torch.Tensor) -> None:
        """Takes the gradient of a local step, where gradients decide about the bits of weights (Øland & Raj §3.2)."""
        if self._observes:
            self._observed_squares += float(gradient.detach().double().square().sum())
            self._num_observed += gradient.numel()

    def encode_values(self) -> EncodedTensor:
        """Returns the push of the values themselves, after any number of local steps."""
        if self._observes:
            rms = math.sqrt(self._observed_squares / max(1, self._num_observed))
            self.step_options = {"rms": rms} if math.isfinite(rms) else {}  # else what is not finite is said of values
        frame = self.encode(self.values, None)
        self._observed_squares, self._num_observed = 0.0, 0
        return frame

    @property
    def encodes_in_batches(self) -> bool:
        """Whether its gradients are encoded together with others': those on a GPU, where nothing accumulated."""
        return not self.on_host and self._accumulated.sum is None

    def note_norm(self, norm: float) -> None:
        """Notes the 2-norm of the next push."""
        self.gradient_norm = norm if not self.gradient_norm else 0.9 * self.gradient_norm + 0.1 * norm

    def local_scale(self, gradient: torch.Tensor) -> float:
        """Returns the scale that a push of `gradient` asks for by itself."""
        assert self.context is not None
        return self.context.local_scale(_narrowed(gradient))

    @property
    def takes_norm(self) -> bool:
        """Whether the norm of the next push is computed."""
        assert self.context is not None
        return self.measures or self.context.step % NORM_EVERY == 0

    def keep_residual(self) -> None:
        """Copies the residual, and what accumulated, before a push that may turn out to have had no effect."""
        assert self.context is not None
        if self.revocable:
            self._accumulated_before = self._accumulated
            if self.context.residual is not None:
                self._residual_before = self.context.residual.clone()

    def encoded(self, seconds: float) -> None:
        """Counts a push that was encoded in so many seconds; nothing is accumulated any more."""
        assert self.context is not None
        self._accumulated = Accumulated()
        self._pushed_at = self._now()
        self.count_push(self.context.payload_nbytes, seconds)

    def refusal(self) -> bytes:
        """The frame that says: this worker's gradients are not finite, so all workers skip this step."""
        assert self.context is not None
        self._residual_before, self._accumulated_before = None, Accumulated()  # nothing was encoded: none to restore
        return pack(Frame(self.context.codec.id, "fp32", self.spec.shape, flags=int(Flags.NON_FINITE)))

    def count_push(self, payload_nbytes: int, seconds: float) -> None:
        """Counts one push."""
        count_pushes([self], [payload_nbytes], seconds)

    # ---- down

    def apply(self, updates: Sequence[Update], local_step: LocalStep | None, step: int) -> None:
        """Applies updates to the copy, in order.

        Args:
            updates: what `Conversation.pull` returned.
            local_step: runs the optimizer where the updates are average gradients; None where they are deltas.
            step: which step they belong to, for the records.
        """
        begin = self._now()
        nbytes = [self._apply(update, local_step) for update in updates]
        if any(update.frame for update in updates):
            self.note_change(step)
        counted = [size for size, update in zip(nbytes, updates, strict=True) if update.frame and update.version > 0]
        if counted:
            count_pulls([self] * len(counted), counted, self._now() - begin)

    def note_change(self, step: int) -> None:
        """Notes for the records that a step changed the copy."""
        if self.measures:
            self.changed_in.add(step)

    def _apply(self, update: Update, local_step: LocalStep | None) -> int:
        """Applies one update; returns its payload's size in bytes."""
        accumulated, self._accumulated_before = self._accumulated_before, Accumulated()
        if update.missed:
            self.counters.add("late_pushes", 1 if update.frame else 0)
            if self._residual_before is not None and self.context is not None and self.context.residual is not None:
                # The update was made without our gradient: what encoding that left in the residual goes with it.
                self.context.residual.copy_(self._residual_before)
        if not update.frame:
            self.counters.add("skipped_updates", 1)
            if update.missed:  # all but the gradient of the skipped step
                self._accumulated = accumulated.joined(self._accumulated)
            return 0
        if update.whole:
            return self._replace(update)
        if local_step is None:
            self.begin_update()
            nbytes = self.decode(update.frame, self.values, accumulate=True)
            self.end_update(update)
        else:
            gradient = torch.empty_like(self.values)
            nbytes = self.decode(update.frame, gradient, accumulate=False)
            local_step(self, gradient, update)
        return nbytes

    def begin_update(self) -> None:
        """Called before an update is added to the copy."""
        if self.outer is not None:
            self.outer.begin_once(self.values)

    def end_update(self, update: Update) -> None:
        """Called after an update was added to the copy."""
        if self.outer is not None:
            self.outer.follow(self.values, update.momentum)

    def _replace(self, update: Update) -> int:
        """Takes over whole values, and the momentum that came with them; returns the payload's size in bytes."""
        if self.outer is not None and update.version > 0 and not update.ahead:
            raise ProtocolError(f"{self.spec.name}: values of version {update.version} came without their momentum")
        nbytes = self.decode(update.frame, self.values, accumulate=False)
        if self.outer is not None:
            self.outer.begin(self.values)
            if update.ahead:
                anchor, by = torch.empty_like(self.values), torch.empty_like(self.values)
                for frame, out in zip(update.ahead, (anchor, by), strict=True):
                    self.decode(frame, out, accumulate=False)
                self.outer.load(anchor, by)
        return nbytes

    def decode(self, frame: EncodedTensor, out: torch.Tensor, *, accumulate: bool) -> int:
        """Decodes a frame of this table, or its values in a batch; returns its payload's size in bytes."""
        if isinstance(frame, BatchedTensor):
            if frame.values.size != out.numel():
                raise ProtocolError(
                    f"{self.spec.name}: {frame.values.size} values came in a batch, the table is {self.spec.shape}"
                )
            values = torch.from_numpy(frame.values).view(out.shape).to(out.device)
            out.add_(values) if accumulate else out.copy_(values)
            return len(frame)
        opened = self.open(frame)
        opened.decode(out, accumulate=accumulate)
        return opened.payload_nbytes

    def open(self, frame: bytes | memoryview) -> CheckedFrame:
        """Checks a frame of this table. Raises FrameError, or ProtocolError where it is another's."""
        name, shape = self.spec.name, self.spec.shape
        parsed = parse(frame, copy=False)
        if parsed.shape != shape:  # before any stage of it is undone
            raise ProtocolError(f"{name}: a frame of shape {parsed.shape}, the table is {shape}")
        return open_parsed(parsed)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the context's state and of what accumulated, if anything."""
        assert self.context is not None
        state = self.context.state_dict() | self._accumulated.state_dict()
        if self._num_observed:
            state["squares"], state["num_observed"] = self._observed_squares, self._num_observed
        return state

    def forget(self) -> None:
        """Drops the residual and accumulated gradients."""
        self._accumulated = Accumulated()
        if self.residual is not None:
            self.residual.zero_()

    def check_state(self, state: object) -> SavedTable:
        """Returns what `state_dict` returned as a record. Raises ConfigError where it is not of this table."""
        assert self.context is not None
        saved = read(SavedTable, state, self.spec.name)
        self.context.check_state(state)
        if saved.accumulated is not None and tuple(saved.accumulated.shape) != self.spec.shape:
            raise ConfigError(
                f"the state of {self.spec.name} is damaged: gradients of shape {tuple(saved.accumulated.shape)} wait, "
                f"and the table has {self.spec.shape}"
            )
        return saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned. Raises as `check_state`; nothing has changed then."""
        assert self.context is not None
        saved = self.check_state(state)
        self.context.load_state_dict(state)
        self._accumulated = Accumulated.of_state(
            saved.accumulated, saved.accumulated_iterations, saved.accumulated_squares
        )
        self._observed_squares, self._num_observed = saved.squares, saved.num_observed


def prepare_all(tables: Sequence[WorkerTable], totals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Does what `prepare` does, of tables on GPUs, with one wait for all norms of each."""
    asked: dict[torch.device, list[tuple[WorkerTable, torch.Tensor]]] = {}
    for table, total in zip(tables, totals, strict=True):
        if table.takes_norm:
            asked.setdefault(total.device, []).append((table, total))
    for some in asked.values():
        norms = torch.stack([total.float().norm() for _, total in some]).tolist()
        for (table, _), norm in zip(some, norms, strict=True):
            table.note_norm(norm)
    for table in tables:
        table.keep_residual()
    return [_narrowed(total) for total in totals]


def _narrowed(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient in float32, as tables are."""
    return gradient.float() if gradient.dtype == torch.float64 else gradient
