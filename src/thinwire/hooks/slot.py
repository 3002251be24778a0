"""One table at a worker: what is pushed for it, what is held back, and how an update of it is applied.

Both happen where the tensor lies: a gradient on a GPU is encoded there, and an update is decoded there. Only gradients
that a policy holds back wait in the host's memory, whose arithmetic criteria are made of.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch

from thinwire.codecs import Codec, Context, StepOptions, open_frame
from thinwire.codecs.tensors import FloatArray, flatten
from thinwire.errors import NonFiniteError, ProtocolError
from thinwire.frames import Flags, Frame, pack
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.policies.compression import is_batched
from thinwire.policies.criteria import Criterion, Pending
from thinwire.runtime.session import Session
from thinwire.schema import TableSpec
from thinwire.telemetry import Counters
from thinwire.worker.core import Update

NO_GRADIENT = b""
NORM_EVERY = 8

LocalStep = Callable[["Slot", torch.Tensor, Update], None]
"""Runs the worker's own optimizer on one slot: the average gradient, and the update that brought it, for its rates."""


class Slot:
    """A table of one shard, seen from a worker.

    Args:
        session: with the shard.
        table: its index there.
        values: the worker's copy, a view in the table's shape; a tensor where that lies on a GPU.
        span: which values of the tensor they are.
        codec: of the pushes; None for buffers, which travel as they are.
        counters: for bytes and seconds.
        seed: of the codec's random stream.
        undoable: whether a push may turn out to have come too late.

    Attributes:
        home: the worker's copy as a tensor, where it lies.
    """

    def __init__(
        self,
        session: Session,
        table: int,
        values: FloatArray | torch.Tensor,
        span: slice,
        codec: Codec | None,
        counters: Counters,
        *,
        seed: int,
        undoable: bool,
    ) -> None:
        self.session, self.table, self.span = session, table, span
        self.home = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
        self._values = None if isinstance(values, torch.Tensor) else values
        self.spec: TableSpec = session.core.plan.tables[table]
        self.context: Context | None = None
        if codec is not None:
            self.context = codec.context(values, name=self.spec.name, seed=seed)
        self._batched = codec is not None and self.on_host and is_batched(codec, self.spec.shape)
        self.staleness = 0
        self.pushed_nbytes = self.pulled_nbytes = 0
        self.encode_s = self.decode_s = self.wait_s = 0.0
        self._counters = counters
        self._undoable = undoable
        self._held: FloatArray | None = None
        self._held_iterations = 0
        self._held_squares = 0.0
        self._sent_at = time.monotonic()
        self._before: torch.Tensor | None = None
        self.step_options: StepOptions = {}
        """What the codec is to know of this step: the workers' shared scale, or the gradients' root mean square."""
        self._notes_rms = codec is not None and "rms" in codec.scheme.step_options
        self._squares, self._noted = 0.0, 0
        self.measures = False
        """Whether the norm of every gradient is followed, which costs a pass over each; otherwise of every 8th."""
        self.gradient_norm = 0.0

    @property
    def values(self) -> FloatArray:
        """The worker's copy in the host's memory: itself, or what was copied from a GPU just now."""
        if self._values is not None:
            return self._values
        copied: FloatArray = self.home.cpu().numpy()
        return copied

    @property
    def on_host(self) -> bool:
        """Whether the worker's copy is in the host's memory."""
        return self._values is not None

    def behind(self, *, fully: bool = False) -> bool:
        """Whether the copy lacks more than the policy allows (`fully`: anything)."""
        return self.session.core.wants(self.table, fully=fully)

    # ---- up

    def hold(self, gradient: torch.Tensor) -> None:
        """Keeps a gradient for a later push. Raises NonFiniteError before anything is changed."""
        if not self.on_host:
            warnings.warn(
                "the consistency policy holds gradients back, which it does in the host's memory: every gradient on "
                f"{self.home.device.type} is copied there whole (4 bytes a value), and the sum back to be encoded",
                UserWarning,
                stacklevel=2,
            )
        self._held = self._with_held(gradient)
        self._held_iterations += 1
        self._held_squares += float(np.vdot(_flat(gradient), _flat(gradient)))

    def encode(self, gradient: torch.Tensor | None, criterion: Criterion | None) -> EncodedTensor:
        """Returns this step's push: everything held, and `gradient`. Empty where there is nothing to send.

        Raises:
            NonFiniteError: NaN or Inf; residual and held gradients are what they were.
        """
        assert self.context is not None
        if gradient is None and self._held is None:
            return NO_GRADIENT
        if criterion is not None and gradient is not None:
            self.hold(gradient)
            gradient = None
            assert self._held is not None
            since = time.monotonic() - self._sent_at
            pending = Pending(self._held, self.values, self._held_iterations, self._held_squares, since)
            if not criterion.send(pending):
                return NO_GRADIENT
        if self._held is None:
            assert gradient is not None
            total = self.prepare(gradient)
        else:
            total = self.prepare(torch.from_numpy(self._held if gradient is None else self._with_held(gradient)))
        begin = time.perf_counter()
        frame = (
            self._as_batched(total, self.context) if self._batched else self.context.encode(total, **self.step_options)
        )
        self.encoded(time.perf_counter() - begin)
        return frame

    def note_gradient(self, gradient: torch.Tensor) -> None:
        """Adds a local step's gradient to the root mean square that decides about bits (Øland & Raj §3.2)."""
        if self._notes_rms:
            self._squares += float(gradient.detach().double().square().sum())
            self._noted += gradient.numel()

    def encode_weights(self) -> EncodedTensor:
        """Returns the push of the whole weights, after any number of local steps."""
        if self._notes_rms:
            self.step_options = {"rms": math.sqrt(self._squares / max(1, self._noted))}
        frame = self.encode(self.home, None)
        self._squares, self._noted = 0.0, 0
        return frame

    def _as_batched(self, total: torch.Tensor, context: Context) -> BatchedTensor:
        """What `context.encode` does, for a table that travels in a batch."""
        flat = flatten(total, self.spec.name)
        context.check(flat)
        piece = BatchedTensor.of(flat.values, self.spec.name)
        context.sent(len(piece))
        return piece

    @property
    def gathers(self) -> bool:
        """Whether its gradients are encoded together with others: those on a GPU, where nothing is held back."""
        return not self.on_host and self._held is None

    def prepare(self, total: torch.Tensor) -> torch.Tensor:
        """Notes what must be known of a push before it is encoded; returns what to encode."""
        assert self.context is not None
        if self.measures or self.context.step % NORM_EVERY == 0:
            norm = float(total.float().norm())
            self.gradient_norm = norm if not self.gradient_norm else 0.9 * self.gradient_norm + 0.1 * norm
        if self._undoable and self.context.residual is not None:
            self._before = self.context.residual.clone()
        return total.float() if total.dtype == torch.float64 else total  # tables are float32

    def encoded(self, seconds: float) -> None:
        """Books a push that was encoded: nothing is held back any more."""
        assert self.context is not None
        self._held, self._held_iterations, self._held_squares = None, 0, 0.0
        self._sent_at = time.monotonic()
        self.count_push(self.context.payload_nbytes, seconds)

    def refusal(self) -> bytes:
        """The frame that says: this worker's gradients are not finite, everybody skips this step."""
        assert self.context is not None
        self._before = None  # nothing was encoded, so there is nothing to put back
        shape = self.spec.shape
        return pack(Frame(self.context.codec.id, "fp32", shape, flags=int(Flags.NON_FINITE)))

    def count_push(self, payload_nbytes: int, seconds: float) -> None:
        """Books one push."""
        self.pushed_nbytes, self.encode_s = payload_nbytes, seconds
        self._counters.add("payload_bytes_push", payload_nbytes)
        self._counters.add("values_push", self.home.numel())
        self._counters.add("encode_seconds", seconds)

    def _with_held(self, gradient: torch.Tensor) -> FloatArray:
        flat = _flat(gradient)
        if not np.isfinite(flat).all():
            raise NonFiniteError(f"{self.spec.name}: holds NaN or Inf; nothing was kept and no state was changed")
        total: FloatArray = flat.reshape(self.spec.shape) + (0 if self._held is None else self._held)
        return total.astype(np.float32, copy=False)

    # ---- down

    def pull(self, local_step: LocalStep | None, *, fully: bool = False) -> bool:
        """Waits until the copy is recent enough, applies what has come; returns whether anything was applied."""
        asked = time.perf_counter()
        updates = self.session.take(self.table, fully=fully)
        begin = time.perf_counter()
        self.wait_s = begin - asked
        for update in updates:
            self._apply(update, local_step)
        self.decode_s = time.perf_counter() - begin
        self._counters.add("decode_seconds", self.decode_s)
        core = self.session.core
        self.staleness = 0 if self.spec.state else max(0, core.step - core.versions[self.table])
        return bool(updates)

    def _apply(self, update: Update, local_step: LocalStep | None) -> None:
        if update.missed:
            self._counters.add("late_pushes", 1 if update.frame else 0)
            if self._before is not None and self.context is not None and self.context.residual is not None:
                # The update was made without our gradient: what that left in the residual goes with it.
                self.context.residual.copy_(self._before)
        if not update.frame:
            self._counters.add("skipped_updates", 1)
            return
        if update.version == 0 or update.whole or local_step is None:
            nbytes = self._decode(update.frame, self.home, accumulate=not update.whole)
        else:
            gradient = torch.empty_like(self.home)
            nbytes = self._decode(update.frame, gradient, accumulate=False)
            local_step(self, gradient, update)
        if update.version > 0:
            self.pulled_nbytes = nbytes
            self._counters.add("payload_bytes_pull", nbytes)
            self._counters.add("values_pull", self.home.numel())

    def _decode(self, frame: EncodedTensor, out: torch.Tensor, *, accumulate: bool) -> int:
        """Decodes a frame of this table, or its values in a batch; returns its payload's size."""
        if isinstance(frame, BatchedTensor):
            return self._take_batched(frame, out, accumulate=accumulate)
        opened = open_frame(frame)
        if opened.frame.shape != self.spec.shape:
            raise ProtocolError(
                f"{self.spec.name}: a frame of shape {opened.frame.shape}, the table is {self.spec.shape}"
            )
        if self.on_host:
            opened.decode_flat(out.view(-1).numpy(), accumulate=accumulate)
        else:
            opened.decode(out, accumulate=accumulate)
        return opened.payload_nbytes

    def _take_batched(self, piece: BatchedTensor, out: torch.Tensor, *, accumulate: bool) -> int:
        if piece.values.size != self.home.numel():
            raise ProtocolError(
                f"{self.spec.name}: {piece.values.size} values came in a batch, the table is {self.spec.shape}"
            )
        if self.on_host:
            piece.unpack(out.view(-1).numpy(), accumulate=accumulate)
        else:
            values = torch.from_numpy(piece.values).view(out.shape).to(out.device)
            out.add_(values) if accumulate else out.copy_(values)
        return len(piece)

    def forget_step(self) -> None:
        """Starts the books of the next step."""
        self.pushed_nbytes = self.pulled_nbytes = 0
        self.encode_s = self.decode_s = self.wait_s = 0.0

    # ---- state

    def state_dict(self) -> dict[str, object]:
        """The context's state, and what is held back."""
        assert self.context is not None
        state: dict[str, object] = self.context.state_dict()
        if self._held is not None:
            state |= {
                "held": torch.from_numpy(self._held.copy()),
                "held_iterations": self._held_iterations,
                "held_squares": self._held_squares,
            }
        return state

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Takes back what `state_dict` gave."""
        assert self.context is not None
        self.context.load_state_dict(state)
        held = state.get("held")
        self._held = held.numpy().copy() if isinstance(held, torch.Tensor) else None
        self._held_iterations = int(str(state.get("held_iterations", 0)))
        self._held_squares = float(str(state.get("held_squares", 0.0)))


def _flat(gradient: torch.Tensor) -> FloatArray:
    values: FloatArray = gradient.detach().to(device="cpu", dtype=torch.float32).contiguous().view(-1).numpy()
    return values
