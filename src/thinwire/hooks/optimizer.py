"""The optimizer of one worker: torch's interface, with the shards behind it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch
import xxhash
from torch import nn

from thinwire.codecs.registry import codec as make_codec
from thinwire.codecs.stochastic import TernGrad
from thinwire.errors import ConfigError, NonFiniteError, ProtocolError
from thinwire.hooks.planning import Planned, PlannedTensor
from thinwire.hooks.replica import Replica
from thinwire.hooks.slot import Slot
from thinwire.policies.designs import Design
from thinwire.runtime.outlets import Outlet
from thinwire.runtime.session import Session
from thinwire.server.updater import Updater
from thinwire.telemetry import Counters, StepRecord

PLAIN = make_codec("fp32")
LAG_WARNING = 100.0
"""Steps of updates waiting in a residual: 2–4 are normal at s = 1, 11–31 at 1.75; far more is a rate too high."""


class Tensor:
    """One tensor of the model at this worker: its copy and its slots."""

    def __init__(self, planned: PlannedTensor, replica: Replica, slots: list[Slot]) -> None:
        self.name, self.state, self.parameter = planned.name, planned.state, planned.tensor
        self.replica, self.slots = replica, slots

    def behind(self, *, fully: bool = False) -> bool:
        """Whether a part of the copy lacks more than the policy allows (`fully`: anything)."""
        return any(slot.behind(fully=fully) for slot in self.slots)


class DistributedOptimizer(torch.optim.Optimizer):
    """The optimizer of one worker. `step`, `zero_grad`, `param_groups` and schedulers work as they always do.

    Example::

        opt = tw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), server="grpc://10.0.0.1:7070",
                            rank=rank, workers=4, codec="3lc", sparsity=1.75)
        with opt:
            for x, y in batches:
                opt.zero_grad()
                loss(model(x), y).backward()
                opt.step()
            opt.sync()          # before evaluating or saving the model
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        planned: Planned,
        sessions: Sequence[Session],
        design: Design,
        *,
        seed: int,
        outlets: Sequence[Outlet] = (),
    ) -> None:
        super().__init__([{"params": list(group["params"])} for group in optimizer.param_groups], optimizer.defaults)
        # One list for both, so that a scheduler made for either moves the rate of both.
        self.param_groups = optimizer.param_groups
        self.counters = Counters()
        self.assignment = planned.assignment
        self._sessions = list(sessions)
        self._design = design
        self._policy = sessions[0].core.policy
        self._outlets = outlets
        self._iteration = 0
        self._began = False
        self._accumulating = self._last = self._closed = False
        self._warned = False
        short = self._policy.quorum(planned.plans[0].workers) < planned.plans[0].workers
        self._short = short and not self._policy.immediate
        self._together = design.transmission == "traditional" or self._policy.together()
        # Whoever skips steps together looks at all gradients before any of them is encoded.
        self._skips = design.up.nonfinite == "skip"
        self._undoable = self._short or self._skips
        # Where more may have come than must have come, it is taken as well.
        self._loose = short or self._policy.immediate or self._policy.lead() > 0
        self._tensors = [self._open(tensor, seed * 65_537 + self.rank) for tensor in planned.tensors]
        for slot in self._pushing():
            slot.measures = bool(outlets)
        self._index = {id(tensor.parameter): index for index, tensor in enumerate(self._tensors)}
        self._reached: set[int] = set()
        self._unreached: list[int] | None = None
        self._local = self._local_optimizer(planned) if design.downlink != "delta" else None
        self._start()
        self._handles = self._hook(model)

    # ---- the optimizer's interface

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends the step: pushes what has not left yet. The model changes when it is next used, or at `sync()`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_open()
        if self._design.downlink == "weights":
            self._step_alone()
        if self._exchanging:
            self._end_exchange()
        else:
            self._hold_all()
        self._iteration += 1
        self._began = True
        self.counters.add("steps", 1)
        if self._outlets:
            self._record()
        if self._together:
            for tensor in self._tensors:
                self._pull(tensor)
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate gradients; the next one outside pushes the sum."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def sync(self) -> None:
        """Waits for, and applies, everything up to the last step: call it before evaluating or saving the model."""
        self._check_open()
        for tensor in self._tensors:
            self._pull(tensor, fully=True)

    def flush(self) -> None:
        """Exchanges what a policy still holds back; all workers call it after the same step, at the end."""
        holds_back = self._policy.criterion() is not None or not self._policy.exchanges(self._iteration - 1)
        if self._iteration and holds_back:
            self.sync()  # no forward pass came in between
            self._end_exchange(held_only=True)
        self.sync()

    def stop_after_this_step(self) -> None:
        """Worker 0 says, before a step's backward pass, that this step is the last for everyone."""
        self._last = True

    @property
    def finished(self) -> bool:
        """Whether worker 0 ended the training with the last step. Waits for the server's word on that step."""
        return self._sessions[0].core.step > 0 and self._sessions[0].is_last()

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._sessions[0].core.rank

    @property
    def steps_done(self) -> int:
        """Steps taken so far, exchanged or not."""
        return self._iteration

    @property
    def clock(self) -> int:
        """Exchanges that this worker has taken part in, or was carried past."""
        return self._sessions[0].core.step

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's residuals, held gradients, random streams, options and its own optimizer's state."""
        state: dict[str, Any] = {
            "step": self._iteration,
            "contexts": {slot.spec.name: slot.state_dict() for slot in self._pushing()},
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ],
        }
        if self._local is not None:
            state["optimizer"] = self._local.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave, by parameter name.

        Raises:
            ConfigError: a parameter of this model is missing in the state.
        """
        contexts = state_dict["contexts"]
        for slot in self._pushing():
            if slot.spec.name not in contexts:
                raise ConfigError(f"the state has no residual for {slot.spec.name!r}; it has {sorted(contexts)[:8]} …")
        for slot in self._pushing():
            slot.load_state_dict(contexts[slot.spec.name])
        self._iteration = int(state_dict["step"])  # which decides when an exchange is due
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        if self._local is not None and "optimizer" in state_dict:
            self._local.optimizer.load_state_dict(state_dict["optimizer"])

    def close(self) -> None:
        """Leaves the training in good order. The model stays usable; further steps are refused."""
        if not self._closed:
            self._closed = True
            for handle in self._handles:
                handle.remove()
            for session in self._sessions:
                session.close()
            for outlet in self._outlets:
                outlet.close()

    def __enter__(self) -> DistributedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def traffic(self) -> dict[str, float]:
        """Returns this worker's sums so far: payload and wire bytes and values each way, and seconds by purpose."""
        sums = dict(self.counters.snapshot())
        for session in self._sessions:
            for name, amount in session.counters.snapshot().items():
                sums[name] = sums.get(name, 0) + amount
        sent, received = zip(*(session.wire_nbytes for session in self._sessions), strict=True)
        return {**sums, "wire_bytes_push": sum(sent), "wire_bytes_pull": sum(received)}

    def residual_ratios(self) -> dict[str, float]:
        """Returns, per table, ‖residual‖ in units of a gradient's norm: how many steps are waiting.

        The unit is the running mean of the gradients' norms, so that one easy batch does not look like a lag.
        """
        ratios = {}
        for tensor in self._tensors:
            for slot in tensor.slots:
                residual = None if slot.context is None else slot.context.residual
                if residual is not None and tensor.parameter.grad is not None:
                    unit = slot.gradient_norm or float(_part(tensor.parameter.grad, slot).float().norm())
                    ratios[slot.spec.name] = float(residual.norm()) / unit if unit else 0.0
        return ratios

    def _warn_of_lag(self, ratios: dict[str, float]) -> None:
        if not self._warned and any(ratio > LAG_WARNING for ratio in ratios.values()):
            self._warned = True
            worst = max(ratios, key=lambda name: ratios[name])
            warnings.warn(
                f"{worst}: {ratios[worst]:.0f} steps of updates wait in its residual; a smaller learning rate or "
                "sparsity multiplier would let them through",
                UserWarning,
                stacklevel=4,
            )

    # ---- setting up

    def _open(self, planned: PlannedTensor, seed: int) -> Tensor:
        replica = Replica(planned.tensor)
        slots = []
        for piece in planned.pieces:
            session = self._sessions[piece.shard]
            shape = session.core.plan.tables[piece.table].shape
            slots.append(
                Slot(
                    session,
                    piece.table,
                    replica.piece(piece.start, piece.stop, shape),
                    slice(piece.start, piece.stop),
                    None if planned.state else planned.up,
                    self.counters,
                    seed=seed,
                    undoable=self._undoable,
                )
            )
        return Tensor(planned, replica, slots)

    def _local_optimizer(self, planned: Planned) -> Updater:
        """This worker's own optimizer over the slots' values, in the order of the slots."""
        self._local_slots = list(self._pushing())
        specs = tuple(slot.spec for slot in self._local_slots)
        self._local_values = {id(slot): torch.from_numpy(slot.values) for slot in self._local_slots}
        plan = msgspec.structs.replace(planned.plans[0], tables=specs)
        return Updater(plan, list(self._local_values.values()))

    def _start(self) -> None:
        """Joins every shard; worker 0's weights become everybody's."""
        asked = [session.join() for session in self._sessions]
        if self._undoable:  # the others may be in the middle of a step, which all shards will have had before ours
            newest = max(session.core.step for session in self._sessions)
            for session in self._sessions:
                session.core.step = newest
        for session, send_values in zip(self._sessions, asked, strict=True):
            slots = [slot for tensor in self._tensors for slot in tensor.slots if slot.session is session]
            slots.sort(key=lambda slot: slot.table)
            if send_values:
                session.send(session.core.initial(tuple(PLAIN.encode(slot.values) for slot in slots)))
        self.sync()

    def _hook(self, model: nn.Module) -> list[Any]:
        handles: list[Any] = []
        for module in model.modules():
            tensors = [
                self._tensors[self._index[id(tensor)]]
                for tensor in (*module._parameters.values(), *module._buffers.values())
                if tensor is not None and id(tensor) in self._index
            ]
            if tensors and module is not model:
                handles.append(module.register_forward_pre_hook(self._forward_hook(tensors)))
        handles.append(model.register_forward_pre_hook(self._root_hook(model)))
        for tensor in self._tensors:
            if not tensor.state:
                register: Any = tensor.parameter.register_post_accumulate_grad_hook  # untyped in torch
                handles.append(register(self._gradient_hook(tensor)))
        return handles

    # ---- while the model runs

    def _forward_hook(self, tensors: list[Tensor]) -> Callable[..., None]:
        indices = [self._index[id(tensor.parameter)] for tensor in tensors]

        def before_forward(_module: nn.Module, _inputs: Any) -> None:
            self._reached.update(indices)
            for tensor in tensors:
                self._pull(tensor)

        return before_forward

    def _root_hook(self, model: nn.Module) -> Callable[..., None]:
        own = [self._index[id(p)] for p in model._parameters.values() if p is not None and id(p) in self._index]

        def before_model(_module: nn.Module, _inputs: Any) -> None:
            # Some modules use another's parameters without calling it (attention does). The first forward pass
            # shows which tables no call announces; from the second on, the model's own call waits for them.
            if self._began and self._unreached is None:
                self._unreached = [index for index in range(len(self._tensors)) if index not in self._reached]
            for index in {*own, *(self._unreached or ())}:
                self._pull(self._tensors[index])

        return before_model

    def _gradient_hook(self, tensor: Tensor) -> Callable[[torch.Tensor], None]:
        def after_accumulate(_parameter: torch.Tensor) -> None:
            if tensor.behind():
                raise ProtocolError(
                    f"{tensor.name!r} was used before its last update was applied: its module was not "
                    "called through the model. Call opt.sync() before such a forward pass"
                )
            if self._exchanging and not (self._together or self._skips or self._accumulating):
                self._push(tensor)

        return after_accumulate

    # ---- up

    @property
    def _exchanging(self) -> bool:
        return self._policy.exchanges(self._iteration)

    def _push(self, tensor: Tensor, *, held_only: bool = False, refuse: bool = False) -> None:
        self._check_open()
        gradient = None if held_only else tensor.parameter.grad
        for slot in tensor.slots:
            try:
                if refuse:
                    frame = slot.refusal()
                elif self._design.downlink == "weights":
                    frame = slot.encode(torch.from_numpy(slot.values), None)
                else:
                    part = None if gradient is None else _part(gradient, slot)
                    frame = slot.encode(part, self._policy.criterion())
            except NonFiniteError as error:
                raise NonFiniteError(f"gradient of {error}") from None
            slot.session.send(slot.session.core.push(slot.table, frame, self._rates(), last=self._last))

    def _end_exchange(self, *, held_only: bool = False) -> None:
        refuse = self._skips and not self._finite()
        if self._design.share_scales:
            self._share_scales(refuse=refuse)
        for tensor in self._tensors:
            if not tensor.state and any(slot.table in slot.session.core.unpushed() for slot in tensor.slots):
                self._push(tensor, held_only=held_only, refuse=refuse)
        self._push_state()
        digest = self._digest()
        for session in self._sessions:
            session.send(session.core.flush(self._rates(), last=self._last, digest=digest))
        if self._loose:
            for session in self._sessions:
                session.drain()
        newest = 0
        if self._short:
            newest = min(reached for session in self._sessions if (reached := session.core.reached) is not None)
        for session in self._sessions:
            session.core.advance(newest)

    def _hold_all(self) -> None:
        """An iteration without an exchange: its gradient is added to the next push."""
        if self._design.downlink == "weights" or (self._skips and not self._finite()):
            return
        for slot, gradient in self._gradients():
            slot.hold(_part(gradient, slot))

    def _step_alone(self) -> None:
        """Between exchanges of whole weights, every worker trains by itself."""
        assert self._local is not None
        self._local.set_rates(self._rates())
        pairs = [(self._local_values[id(slot)], _part(gradient, slot)) for slot, gradient in self._gradients()]
        self._local.step([value for value, _ in pairs], [_float(gradient, value) for value, gradient in pairs])
        for tensor in self._tensors:
            tensor.replica.show()

    def _finite(self) -> bool:
        """Whether every gradient of this step is finite."""
        return all(bool(torch.isfinite(gradient).all()) for _, gradient in self._gradients())

    def _share_scales(self, *, refuse: bool) -> None:
        """One round trip for all tables: everybody encodes with the largest scale (TernGrad §3.1, equation 5)."""
        for session in self._sessions:
            mine = [0.0] * len(session.core.plan.tables)
            shared = []
            for slot, gradient in self._gradients():
                codec = None if slot.context is None else slot.context.codec
                if slot.session is session and isinstance(codec, TernGrad) and not refuse:
                    mine[slot.table] = codec.local_scale(_part(gradient, slot))
                    shared.append((slot, codec))
            largest = session.maxima(tuple(mine))
            for slot, codec in shared:
                assert slot.context is not None
                slot.context.codec = replace(codec, scale=largest[slot.table])

    def _push_state(self) -> None:
        for tensor in self._tensors:
            [slot] = tensor.slots if tensor.state else [None]
            if slot is None or self.rank != 0 or slot.session.core.step % slot.session.core.plan.state_interval:
                continue
            tensor.replica.refresh()
            slot.count_push(slot.values.nbytes, 0.0)
            frame = PLAIN.encode(slot.values)
            slot.session.send(slot.session.core.push(slot.table, frame, self._rates(), last=self._last))

    def _digest(self) -> str:
        """A hash of the model that this step's gradients were taken from, where the design compares replicas."""
        if not self._design.digest_every or self._iteration % self._design.digest_every:
            return ""
        digest = xxhash.xxh3_64()
        for slot in self._pushing():
            digest.update(slot.values.data)
        return digest.hexdigest()

    # ---- down

    def _pull(self, tensor: Tensor, *, fully: bool = False) -> None:
        if self._loose or tensor.behind(fully=fully):
            step = self._local_step if self._gradient_down else None
            changed = [slot.pull(step, fully=fully) for slot in tensor.slots]
            if any(changed):
                tensor.replica.show()

    def _local_step(self, slot: Slot, gradient: Any, rates: tuple[float, ...]) -> None:
        assert self._local is not None
        self._local.set_rates(rates)
        self._local.step([self._local_values[id(slot)]], [torch.from_numpy(gradient)])

    @property
    def _gradient_down(self) -> bool:
        return self._design.downlink == "gradient"

    # ---- helpers

    def _pushing(self) -> Iterator[Slot]:
        for tensor in self._tensors:
            if not tensor.state:
                yield from tensor.slots

    def _gradients(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        for tensor in self._tensors:
            if not tensor.state and tensor.parameter.grad is not None:
                for slot in tensor.slots:
                    yield slot, tensor.parameter.grad

    def _rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self.param_groups)

    def _record(self) -> None:
        ratios = self.residual_ratios()
        self._warn_of_lag(ratios)
        for slot in self._pushing():
            residual = slot.context.residual if slot.context is not None else None
            record = StepRecord(
                step=self._iteration - 1,
                table=slot.spec.name,
                numel=slot.values.size,
                rank=self.rank,
                payload_bytes_push=slot.pushed_nbytes,
                payload_bytes_pull=slot.pulled_nbytes,
                encode_s=slot.encode_s,
                decode_s=slot.decode_s,
                wait_s=slot.wait_s,
                staleness=slot.staleness,
                residual_norm=None if residual is None else float(residual.norm()),
                residual_lag=ratios.get(slot.spec.name),
                skipped=slot.pushed_nbytes == 0,
            )
            for outlet in self._outlets:
                outlet.record(record)
            slot.forget_step()

    def _check_open(self) -> None:
        if self._closed:
            raise ProtocolError("this worker has left the training; close() was called")


def _part(gradient: torch.Tensor, slot: Slot) -> torch.Tensor:
    """A slot's share of a tensor's gradient, in the table's shape."""
    if tuple(gradient.shape) == slot.spec.shape:
        return gradient
    return gradient.reshape(-1)[slot.span].reshape(slot.spec.shape)


def _float(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return gradient.detach().to(device=like.device, dtype=like.dtype)
