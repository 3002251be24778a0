"""One worker of a training, for all shards: it decides on pushes and on its clock.

It knows tensors with gradients, tables and conversations, and nothing of torch's hooks, connections, threads or clocks.
Its methods that talk to shards are procedures (`conversation.py`), so that a thread, a simulator or a test can run it.
`base.py` has joining, returning and waiting. The constructor decides once all that depends on
design or policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thinwire.codecs.stochastic import TernGrad
from thinwire.errors import NonFiniteError, ProtocolError
from thinwire.optimizers.options import ParameterGroups
from thinwire.policies.designs import Design
from thinwire.schema import MAX_VALUE, Plan
from thinwire.worker.base import Frames, WorkerBase
from thinwire.worker.batching import Batching
from thinwire.worker.conversation import Conversation
from thinwire.worker.effects import Poll, Procedure
from thinwire.worker.model import USED_TOO_EARLY, PlannedTensor, WorkerTensor
from thinwire.worker.sent_gradients import SentGradients

_ABOUT_SCALERS = (
    ". With a GradScaler give tw.distribute(…, nonfinite='skip'), or a design such as '3lc[nonfinite=skip]', with "
    "which all workers skip a step that overflows"
)


class Worker(WorkerBase):
    """One worker, from its first step to its last.

    Args:
        plans, tensors, design, groups, **settings: as for `WorkerBase`.

    Attributes:
        last: whether the step under way is the last for all workers; the caller that ends the training sets it.
        accumulating: whether gradients that are ready stay with their parameters for now.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        tensors: Sequence[PlannedTensor],
        design: Design,
        groups: ParameterGroups,
        **settings: Any,
    ) -> None:
        super().__init__(plans, tensors, design, groups, **settings)
        self.last = self.accumulating = False
        self._criterion = self._policy.criterion()
        self._barrier = design.transmission == "traditional" or self._terms.barrier
        self._batching = Batching(self._now)
        self._sent_gradients = SentGradients()
        self._batches = design.downlink != "weights" and self._criterion is None
        self._announced = -1

    # ---- the training

    @property
    def pushes_early(self) -> bool:
        """Whether the gradients of this step leave during its backward pass."""
        return self._exchanging and not (self._barrier or self._skips)

    @property
    def delay(self) -> int:
        """Steps that go on while an exchange is under way."""
        return 0 if self._design.local is None else self._design.local.delay

    @property
    def idle(self) -> bool:
        """Whether nothing is to be pulled or heeded of any tensor now; False where that has to be asked for each."""
        return False

    def awaits(self, tensor: WorkerTensor) -> bool:
        """Whether `pull` has anything to do for a tensor."""
        return not self.model.evaluating and (self._terms.accepts_newer or self._is_stale(tensor))

    def gradient_ready(self, tensor: WorkerTensor) -> Procedure[None]:
        """Pushes a gradient that the backward pass has produced, unless the design or the policy has it wait.

        Raises:
            ProtocolError: the parameter was used before its last update was applied, or holds averaged weights.
        """
        if self.model.evaluating:
            raise ProtocolError("averaged weights are for evaluation; run backward passes outside the block")
        if self._is_stale(tensor):
            raise ProtocolError(USED_TOO_EARLY.format(name=tensor.name))
        if self.pushes_early and not self.accumulating:
            yield from self._push(tensor)
            self._sent_gradients.add(tensor, self._groups if self._terms.owns_hyperparameters(self.rank) else None)

    def end_step(self) -> Procedure[None]:
        """Pushes what has not left yet, and moves the clock.

        Raises:
            ConfigError: a gradient, or a rate, was changed after gradients had left.
            NonFiniteError: a gradient that has not left holds NaN or Inf; where none had, nothing has changed.
        """
        self.check_open()
        self._sent_gradients.end_step(self._groups)
        yield from self._pull_uncalled()
        refuse = self._refuses()
        self.model.update_average()
        if self._design.downlink == "weights" and not refuse:  # between exchanges, every worker trains by itself
            self.model.step_locally(self._groups.settings, self.iteration)
        if self._exchanging:
            yield from self._exchange(refuse=refuse)
        elif self._design.downlink != "weights" and not refuse:
            for table, gradient in self.model.gradients():
                table.accumulate(gradient)
        self._end_iteration()

    def _refuses(self) -> bool:
        """Checks the gradients that wait for the end of the step: whether one makes all workers skip it.

        Raises:
            NonFiniteError: one holds NaN or Inf, and such steps are not skipped.
        """
        table = None if self.pushes_early else self.model.find_nonfinite()
        if table is not None and not self._skips:
            raise NonFiniteError(
                f"gradient of {table.spec.name}: the values hold NaN or Inf; nothing was changed{self._why_nonfinite()}"
            )
        return table is not None

    def _why_nonfinite(self) -> str:
        """Says whether the weights that came made a gradient NaN or Inf; else what a GradScaler needs."""
        for tensor in self.model.tensors:
            if tensor.state or not tensor.values.numel():
                continue
            if not (largest := float(tensor.values.abs().max())) <= MAX_VALUE:  # NaN as well
                version = max(self.conversations[table.shard].versions[table.index] for table in tensor.tables)
                return (
                    f". It comes of the weights: after update {version} {tensor.name!r} holds values up to "
                    f"{largest:.3g}, with which a forward pass overflows. The training has diverged, or a worker's "
                    "push was out of range: use a smaller learning rate; a server with --min-workers refuses such a "
                    "worker, and goes on with the others"
                )
        return _ABOUT_SCALERS

    def _pull_uncalled(self) -> Procedure[None]:
        """Waits for the last updates of layers that this step did not call, as its forward pass did for the others.

        Otherwise a push without a gradient could come before its turn; and averages and digests are of one version of
        the whole model.
        """
        for tensor in self.model.tensors:
            if not tensor.state and self._is_stale(tensor):
                yield from self.pull(tensor)

    def settle(self) -> Procedure[None]:
        """Pulls everything at once, in designs where all layers travel together."""
        if self._barrier:
            for tensor in self.model.tensors:
                yield from self.pull(tensor)

    def flush(self) -> Procedure[None]:
        """Exchanges what a policy has accumulated."""
        accumulates = self._criterion is not None or not self._policy.exchanges(self.iteration - 1)
        if self.iteration and accumulates:
            yield from self.sync()  # no forward pass came in between
            yield from self._exchange(accumulated_only=True)
        yield from self.sync()

    def finished(self) -> Procedure[bool]:
        """Whether a worker ended the training with the last exchange. Waits for the shard's answer to it."""
        if not self.began:  # this worker has pushed nothing that the shard would answer
            return self.conversations[0].is_over(self.clock)
        return self.clock > 0 and (yield from self.conversations[0].ended(self.clock))

    def _end_iteration(self) -> None:
        self.iteration += 1
        self._note_step()

    def _note_step(self) -> None:
        self.began = True
        self.counters.add("steps", 1)
        self._follow_members()

    # ---- up

    @property
    def _exchanging(self) -> bool:
        return self._policy.exchanges(self.iteration)

    def _exchange(self, *, accumulated_only: bool = False, refuse: bool = False) -> Procedure[None]:
        if self._design.share_scales:
            yield from self._share_scales(refuse=refuse)
        yield from self._push_frames(self._batching.finish())
        for tensor in self.model.tensors:
            if not tensor.state and not all(
                self.conversations[t.shard].transmit.pushed(t.index) for t in tensor.tables
            ):
                yield from self._push(tensor, accumulated_only=accumulated_only, refuse=refuse)
        yield from self._push_frames(self._batching.finish())
        for conversation in self.conversations:
            yield from self._push_frames(self._statistics(conversation, self.clock))
        compares = self._design.digest_every and self.iteration % self._design.digest_every == 0
        # Of the model that this step's gradients were taken from, and what it was computed with.
        digest = f"{torch.backends.cpu.get_cpu_capability()}:{self.model.digest()}" if compares else ""
        for conversation in self.conversations:
            yield from self._flush(conversation, digest)
        yield from self._advance()

    def _advance(self) -> Procedure[None]:
        """Ends the exchange: from now on the model needs every table as far as the policy says.

        Where updates are made without this worker, it continues with the newest version that all tables of all shards
        have reached. There is one clock for all shards: were each to continue with its own, workers could end up
        waiting for each other.
        """
        if self._terms.accepts_newer:
            for conversation in self.conversations:
                yield Poll(conversation.shard)
        self.clock += 1
        if self._terms.partial_quorum:
            reached = [each.updates.reached() for each in self.conversations]
            self.clock = max(self.clock, min(version for version in reached if version is not None))
        for conversation in self.conversations:
            conversation.transmit.end_step()

    def _push(self, tensor: WorkerTensor, *, accumulated_only: bool = False, refuse: bool = False) -> Procedure[None]:
        self.check_open()
        for table in tensor.tables:  # before a residual is touched
            self.conversations[table.shard].transmit.check(self.clock, table.index)
        self._announce_options()
        yield from self._push_frames(self._encode(tensor, accumulated_only=accumulated_only, refuse=refuse))

    def _encode(self, tensor: WorkerTensor, *, accumulated_only: bool, refuse: bool) -> Frames:
        gradient = None if accumulated_only else tensor.parameter.grad
        for table in tensor.tables:
            part = None if gradient is None else table.part_of(gradient)
            if refuse:
                yield table, table.refusal()
            elif self._batches and table.encodes_in_batches and part is not None:
                yield from self._batching.add(table, part)
            elif self._design.downlink == "weights":
                yield table, table.encode_values()
            else:
                yield table, table.encode(part, self._criterion)

    def _push_frames(self, frames: Frames) -> Procedure[None]:
        try:
            for table, frame in frames:
                conversation = self.conversations[table.shard]
                if conversation.push(self.clock, table.index, frame):
                    yield from self._flush(conversation)
        except NonFiniteError as error:
            advice = "" if self._skips or self._design.local is not None else self._why_nonfinite()
            raise NonFiniteError(f"gradient of {error}{advice}") from None

    def _flush(self, conversation: Conversation, digest: str = "") -> Procedure[None]:
        yield from conversation.flush(self.clock, self._groups.rates, last=self.last, digest=digest)

    def _announce_options(self) -> None:
        """Options that a scheduler moved go ahead of the exchange's first gradient, as its rates go with each."""
        if self._announced == self.iteration:
            return
        self._announced = self.iteration
        if self._terms.owns_hyperparameters(self.rank) and (changes := self._groups.changes()):
            for conversation in self.conversations:
                conversation.transmit.announce(changes)

    def _share_scales(self, *, refuse: bool) -> Procedure[None]:
        """One round trip for all tables: all workers encode with the largest scale (TernGrad §3.1, equation 5)."""
        for conversation in self.conversations:
            mine = [0.0] * len(conversation.plan.tables)
            shared = []
            for table, gradient in self.model.gradients():
                scaled = table.context is not None and isinstance(table.context.codec.scheme, TernGrad)
                if table.shard == conversation.shard and scaled and not refuse:
                    mine[table.index] = table.local_scale(gradient)
                    shared.append(table)
            largest = yield from conversation.share_maxima(self.clock, tuple(mine))
            for table in shared:
                table.step_options = {"scale": largest[table.index]}
