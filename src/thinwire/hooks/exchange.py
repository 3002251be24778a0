"""One worker's half of every exchange: what is pushed and when, what is waited for, and when the clock moves.

It knows tensors with gradients, slots and sessions; of torch's hooks and of the optimizer's interface it knows
nothing. Whatever depends on design or policy is decided once, when it is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash

from thinwire.codecs.registry import codec as make_codec
from thinwire.codecs.stochastic import TernGrad
from thinwire.errors import NonFiniteError, ProtocolError
from thinwire.hooks.gathering import Gathering
from thinwire.hooks.local import LocalOptimizer
from thinwire.hooks.planning import Planned
from thinwire.hooks.resuming import check_place, place_of, take_place
from thinwire.hooks.slot import Slot
from thinwire.hooks.tensors import Tensor, part
from thinwire.optimizers.groups import ParameterGroups
from thinwire.packets import EncodedTensor
from thinwire.policies.designs import Design
from thinwire.runtime.session import Session
from thinwire.telemetry import Counters

PLAIN = make_codec("fp32")


class Exchange:
    """A model's tensors at one worker, and the sessions behind them.

    Args:
        planned: the plans and tensors.
        sessions: one with each shard, not joined yet.
        design: what is sent, both ways.
        groups: rates and options, read at every step.
        counters: for bytes, steps and seconds.
        seed: of random codecs.
        measures: whether the norm of every gradient is followed.
    """

    def __init__(
        self,
        planned: Planned,
        sessions: Sequence[Session],
        design: Design,
        groups: ParameterGroups,
        counters: Counters,
        *,
        seed: int,
        measures: bool,
    ) -> None:
        self.iteration = 0
        self.began = False
        """Whether a step was taken here: a resumed worker has an iteration before it has one."""
        self.last = self.accumulating = self.closed = False
        self._sessions = list(sessions)
        self._design, self._groups, self._counters = design, groups, counters
        self._policy = sessions[0].core.policy
        self._terms = self._policy.terms(planned.plans[0].workers)
        self._barrier = design.transmission == "traditional" or self._terms.barrier
        # Whoever skips steps together looks at all gradients before any of them is encoded.
        self._skips = design.up.nonfinite == "skip"
        self._undoable = self._terms.partial_quorum or self._skips
        rank = sessions[0].core.rank
        self._gathering = Gathering(self._send)
        self._gathers = design.downlink != "weights" and self._policy.criterion() is None
        self._announced = -1
        self._resumed = 0
        self._owns_hyperparameters = self._terms.owns_hyperparameters(rank)
        self.tensors = [
            Tensor(
                tensor, self._sessions, counters, seed=seed * 65_537 + rank, undoable=self._undoable, measures=measures
            )
            for tensor in planned.tensors
        ]
        self.local: LocalOptimizer | None = None
        if design.downlink != "delta":
            self.local = LocalOptimizer(planned.plans[0], list(self.pushing()))

    # ---- what the optimizer calls

    def state_dict(self) -> dict[str, Any]:
        """This worker's place in the training; see `resuming.py`."""
        return place_of(self._sessions, self.tensors, with_values=self._design.downlink == "gradient")

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave, before `start`: the shards must be at the same step."""
        self._resumed = take_place(self._sessions, self.tensors, state)

    def start(self) -> None:
        """Joins every shard; worker 0's weights become everybody's."""
        asked = [session.join() for session in self._sessions]
        check_place(self._sessions, self._resumed, may_be_late=self._terms.partial_quorum)
        if self._undoable:  # the others may be in the middle of a step, which all shards will have had before ours
            newest = max(session.core.step for session in self._sessions)
            for session in self._sessions:
                session.core.step = newest
        for session, send_values in zip(self._sessions, asked, strict=True):
            slots = [slot for tensor in self.tensors for slot in tensor.slots if slot.session is session]
            slots.sort(key=lambda slot: slot.table)
            if send_values:
                session.send(session.core.initial(tuple(PLAIN.encode(slot.values) for slot in slots)))
        self.sync()

    def end_step(self) -> None:
        """Pushes what has not left yet, and moves the clock."""
        self.check_open()
        if self._design.downlink == "weights":
            self._step_alone()
        if self._exchanging:
            self._end_exchange()
        else:
            self._hold_all()
        self.iteration += 1
        self.began = True
        self._counters.add("steps", 1)

    def settle(self) -> None:
        """Pulls everything at once, in designs where all layers travel together."""
        if self._barrier:
            for tensor in self.tensors:
                self.pull(tensor)

    def sync(self) -> None:
        """Waits for, and applies, everything up to the last step."""
        self.check_open()
        for tensor in self.tensors:
            self.pull(tensor, fully=True)

    def flush(self) -> None:
        """Exchanges what a policy still holds back."""
        holds_back = self._policy.criterion() is not None or not self._policy.exchanges(self.iteration - 1)
        if self.iteration and holds_back:
            self.sync()  # no forward pass came in between
            self._end_exchange(held_only=True)
        self.sync()

    def pushing(self) -> Iterator[Slot]:
        """The slots of all parameters, in the model's order."""
        for tensor in self.tensors:
            if not tensor.state:
                yield from tensor.slots

    def check_open(self) -> None:
        """Raises ProtocolError once this worker has left."""
        if self.closed:
            raise ProtocolError("this worker has left the training; close() was called")

    # ---- what the model's hooks call

    def gradient_ready(self, tensor: Tensor) -> None:
        """A parameter's gradient is there: it leaves at once, unless the design or the policy has it wait."""
        if tensor.behind():
            raise ProtocolError(
                f"{tensor.name!r} was used before its last update was applied: its module was not "
                "called through the model. Call opt.sync() before such a forward pass"
            )
        if self._exchanging and not (self._barrier or self._skips or self.accumulating):
            self._push(tensor)

    def pull(self, tensor: Tensor, *, fully: bool = False) -> None:
        """Waits until a tensor is recent enough (`fully`: up to date) and applies what has come."""
        if self._terms.accepts_newer or tensor.behind(fully=fully):
            step = self.local.step if self.local is not None and self._design.downlink == "gradient" else None
            changed = [slot.pull(step, fully=fully) for slot in tensor.slots]
            if any(changed):
                tensor.replica.show()

    # ---- up

    @property
    def _exchanging(self) -> bool:
        return self._policy.exchanges(self.iteration)

    def _push(self, tensor: Tensor, *, held_only: bool = False, refuse: bool = False) -> None:
        self.check_open()
        if self._announced != self.iteration:
            self._announce()
        gradient = None if held_only else tensor.parameter.grad
        for slot in tensor.slots:
            try:
                if self._gathers and slot.gathers and gradient is not None and not refuse:
                    self._gathering.add(slot, part(gradient, slot))
                    continue
                frame: EncodedTensor
                if refuse:
                    frame = slot.refusal()
                elif self._design.downlink == "weights":
                    frame = slot.encode_weights()
                else:
                    mine = None if gradient is None else part(gradient, slot)
                    frame = slot.encode(mine, self._policy.criterion())
            except NonFiniteError as error:
                raise NonFiniteError(f"gradient of {error}") from None
            self._send(slot, frame)

    def _send(self, slot: Slot, frame: EncodedTensor) -> None:
        slot.session.send(slot.session.core.push(slot.table, frame, self._groups.rates, last=self.last))

    def _finish_gathering(self) -> None:
        try:
            self._gathering.finish()
        except NonFiniteError as error:
            raise NonFiniteError(f"gradient of {error}") from None

    def _announce(self) -> None:
        """Options that a scheduler moved go ahead of the exchange's first gradient, as its rates go with each."""
        self._announced = self.iteration
        if self._owns_hyperparameters and (changes := self._groups.changes()):
            for session in self._sessions:
                session.core.say(changes)

    def _end_exchange(self, *, held_only: bool = False) -> None:
        refuse = self._skips and not self._finite()
        if self._design.share_scales:
            self._share_scales(refuse=refuse)
        self._finish_gathering()
        for tensor in self.tensors:
            if not tensor.state and any(slot.table in slot.session.core.unpushed() for slot in tensor.slots):
                self._push(tensor, held_only=held_only, refuse=refuse)
        self._finish_gathering()
        self._push_state()
        digest = self._digest()
        for session in self._sessions:
            session.send(session.core.flush(self._groups.rates, last=self.last, digest=digest))
        if self._terms.accepts_newer:
            for session in self._sessions:
                session.drain()
        newest = 0
        if self._terms.partial_quorum:
            newest = min(reached for session in self._sessions if (reached := session.core.reached) is not None)
        for session in self._sessions:
            session.core.advance(newest)

    def _hold_all(self) -> None:
        """An iteration without an exchange: its gradient is added to the next push."""
        if self._design.downlink == "weights" or (self._skips and not self._finite()):
            return
        for slot, gradient in self._gradients():
            slot.hold(part(gradient, slot))

    def _step_alone(self) -> None:
        """Between exchanges of whole weights, every worker trains by itself."""
        assert self.local is not None
        for slot, gradient in self._gradients():
            slot.note_gradient(part(gradient, slot))
        self.local.step_all(
            ((slot, part(gradient, slot)) for slot, gradient in self._gradients()), self._groups.settings
        )
        for tensor in self.tensors:
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
                if slot.session is session and codec and isinstance(codec.scheme, TernGrad) and not refuse:
                    mine[slot.table] = codec.local_scale(part(gradient, slot))
                    shared.append(slot)
            largest = session.maxima(tuple(mine))
            for slot in shared:
                slot.step_options = {"scale": largest[slot.table]}

    def _push_state(self) -> None:
        for tensor in self.tensors:
            [slot] = tensor.slots if tensor.state else [None]
            if slot is None or slot.session.core.rank or slot.session.core.step % slot.session.core.plan.state_interval:
                continue
            tensor.replica.refresh()
            slot.count_push(slot.home.nbytes, 0.0)
            frame = PLAIN.encode(slot.values)
            slot.session.send(slot.session.core.push(slot.table, frame, self._groups.rates, last=self.last))

    def _digest(self) -> str:
        """A hash of the model that this step's gradients were taken from, where the design compares replicas."""
        if not self._design.digest_every or self.iteration % self._design.digest_every:
            return ""
        digest = xxhash.xxh3_64()
        for slot in self.pushing():
            digest.update(slot.values.data)
        return digest.hexdigest()

    def _gradients(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        for tensor in self.tensors:
            if not tensor.state and tensor.parameter.grad is not None:
                for slot in tensor.slots:
                    yield slot, tensor.parameter.grad
