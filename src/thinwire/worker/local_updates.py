"""A worker that trains by itself for H steps and then exchanges what that changed, in both modes. Sans-IO.

The model's parameters are this worker's own (**local**); `WorkerTensor.values` are the **shared** ones θ, equal bit for
bit at every worker. After H inner steps the worker pushes the pseudo-gradient Δ = θ − local, the shards answer with the
outer optimizer's step, and the local parameters continue from the new θ (see `policies.local_updates`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, Protocol

import torch

from thinwire.cautions import caution
from thinwire.errors import ConfigError, NonFiniteError, ProtocolError, check_keys
from thinwire.optimizers.options import ParameterGroups
from thinwire.policies.designs import Design
from thinwire.schema import Plan
from thinwire.worker.apply_buffer import Update
from thinwire.worker.core import Worker
from thinwire.worker.effects import Procedure
from thinwire.worker.fragment import Fragment
from thinwire.worker.model import USED_TOO_EARLY, PlannedTensor, WorkerTensor
from thinwire.worker.same_updates import check_same, coded_by
from thinwire.worker.table import NO_GRADIENT, WorkerTable


class Steers(Protocol):
    """Leads momenta of a worker's own optimizer by what an update changes."""

    def pushed(self) -> None:
        """Is told that all that was changed in the steps so far has been pushed, before any answer is taken."""

    def updated(self, tensors: Sequence[WorkerTensor], before: Sequence[torch.Tensor]) -> None:
        """Is told of an update, and what the shared values were before, float32[n] each, to be overwritten at will."""


@dataclass(slots=True)
class Round:
    """Where one tensor stands.

    Args:
        fragment: with which tensors it is pushed.
        pushes: how often it was pushed, so which version it waits for.
        merges_at: the inner step before which its answer is merged into the local parameters; None: nothing is awaited.
        whole: the merge keeps nothing of the local parameters.
    """

    fragment: int
    pushes: int = 0
    merges_at: int | None = 0
    whole: bool = True


class LocalWorker(Worker):
    """A `Worker` whose own optimizer runs between exchanges. Its `groups` are the outer optimizer's.

    Args:
        plans, tensors, design, groups, **settings: as for `Worker`; the design has `local` set.

    Attributes:
        void: whether the last exchange went without this worker, whose parameters held NaN or Inf.
        steering: leads the momenta of the worker's own optimizer at updates that this worker had a part in; None: they
            are left alone.
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
        assert design.local is not None
        self.void = False
        self.steering: Steers | None = None
        self._updates = design.local
        # Workers push at the same time. Each begins with another shard, so that no shard's link is to take everybody's
        # first message while the others' are idle.
        first = (self.rank + 1) % len(self.conversations)
        self._ring = [*self.conversations[first:], *self.conversations[:first]]
        self._voids = design.up.nonfinite == "skip"
        fragments = self._updates.assign([tensor.values.numel() for tensor in self.model.tensors])
        self._rounds = {t.name: Round(f) for t, f in zip(self.model.tensors, fragments, strict=True)}
        self._fragments: dict[tuple[int, ...], Fragment] = {}
        self._nothing_due = False
        self._flushed_at = 0

    # ---- the training

    def start(self, step: int) -> Procedure[None]:
        yield from super().start(step)
        for tensor in self.model.tensors:
            table = tensor.tables[0]
            # One that joins late continues from the version which its first exchange will change. Where that is still
            # to come, its first step waits for it: what others changed is not this worker's to push.
            version, state = self.conversations[table.shard].versions[table.index], self._rounds[tensor.name]
            state.pushes = max(version, self.clock)
            if version < state.pushes:
                state.merges_at, state.whole = self.iteration, True
        self._look_what_is_due()

    @property
    def pending(self) -> bool:
        """Whether answers are still to be merged into the local parameters."""
        return any(state.merges_at is not None for state in self._rounds.values())

    @property
    def idle(self) -> bool:
        return self._nothing_due and not self.model.evaluating

    def awaits(self, tensor: WorkerTensor) -> bool:
        return self._is_due(tensor) and not self.model.evaluating

    def heeds(self, tensor: WorkerTensor) -> bool:
        return self._is_due(tensor) or self.model.evaluating

    def gradient_ready(self, tensor: WorkerTensor) -> Procedure[None]:
        if self.model.evaluating:
            raise ProtocolError("shared weights are for evaluation; run backward passes outside the block")
        if self._is_due(tensor):
            raise ProtocolError(USED_TOO_EARLY.format(name=tensor.name))
        yield from ()

    def end_step(self) -> Procedure[None]:
        """Ends an inner step, which the worker's own optimizer has taken; pushes the fragment that is due."""
        self.check_open()
        self.model.update_average()
        fragment, ends = self._updates.fragment_due(self.iteration), self._updates.ends_round(self.iteration)
        if fragment is not None:
            rounds = [(tensor, self._rounds[tensor.name]) for tensor in self.model.tensors]
            # Where a flush came within the round, its first fragments are due again: before all later ones, as with
            # a worker that has joined since and begins a round, or each would wait for what the other pushes later.
            due = [t for t, s in rounds if s.fragment == fragment or (s.fragment < fragment and s.pushes == self.clock)]
            yield from self._exchange_tensors(due)
            if ends:
                yield from self._advance()
                if self.steering is not None:
                    self.steering.pushed()
        self._end_iteration()
        self._look_what_is_due()

    def pull(self, tensor: WorkerTensor, *, strict: bool = False) -> Procedure[None]:
        """Merges a tensor's answer into its local parameters, if it is due; `strict` waits for it in any case."""
        if not (strict or self.awaits(tensor)):
            return
        state = self._rounds[tensor.name]
        yield from self._pull([t for t in self.model.tensors if self._rounds[t.name] == state])

    def sync(self) -> Procedure[None]:
        self.check_open()
        yield from self._pull(self.model.tensors)

    def _pull(self, tensors: Sequence[WorkerTensor]) -> Procedure[None]:
        """Waits for the answers to the pushes of some tensors, and merges those that are due."""
        if self.model.evaluating:
            return
        alike: dict[tuple[Any, ...], list[WorkerTensor]] = {}
        for tensor in tensors:
            alike.setdefault(astuple(self._rounds[tensor.name]), []).append(tensor)
        for some in alike.values():
            yield from self._pull_alike(some, self._rounds[some[0].name])
        self._look_what_is_due()

    def _pull_alike(self, tensors: Sequence[WorkerTensor], state: Round) -> Procedure[None]:
        fragment, updates = self._fragment(tensors), self._updates
        pulled: list[tuple[WorkerTable, Sequence[Update]]] = []
        for shard, tables in fragment.by_shard.items():
            asked, indices = self._now(), [table.index for table in tables]
            found = yield from self.conversations[shard].pull_all(indices, [state.pushes] * len(tables), strict=True)
            waited = (self._now() - asked) / len(tables)
            for table, each in zip(tables, found, strict=True):
                table.cost.wait_s += waited
                pulled.append((table, each))
        due, whole = self._is_due(tensors[0]), state.whole
        # Only updates that this worker had a part in tell where all workers went.
        steering = self.steering if due and not whole else None
        before = [] if steering is None else fragment.copy_shared()
        fragment.apply(pulled, self.iteration - 1)
        if steering is not None:
            steering.updated(tensors, before)
        if due:
            fragment.merge(*(0.0, 0.0) if whole else (updates.keep, updates.keep_unsent))
            for merged in (self._rounds[tensor.name] for tensor in tensors):
                merged.merges_at, merged.whole = None, False

    def _fragment(self, tensors: Sequence[WorkerTensor]) -> Fragment:
        """These tensors together; what a call for all of them needs is prepared once."""
        key = tuple(map(id, tensors))
        if key not in self._fragments:
            self._fragments[key] = Fragment(tensors, self._now)
        return self._fragments[key]

    def flush(self) -> Procedure[None]:
        """Ends the round under way, early if need be, and exchanges what waits in residuals as often as `settle` says.

        Every worker then has the same parameters, the shared ones.
        """
        if self.model.evaluating:
            raise ProtocolError("shared weights are for evaluation; call flush() outside the block")
        tensors = self.model.tensors
        if self._flushed_at == self.iteration:
            return  # no step was taken since
        if self.iteration and not self._updates.ends_round(self.iteration - 1):
            early = [each for each in tensors if self._rounds[each.name].pushes == self.clock]
            for state in (self._rounds[each.name] for each in early):
                if state.merges_at is not None:  # else what was pushed last would be found, and pushed, once more
                    state.merges_at = self.iteration
            yield from self._exchange_tensors(early)
            yield from self._advance()
        yield from self._pull_whole()
        for _ in range(self._updates.settle if self.iteration else 0):
            yield from self._exchange_tensors(tensors)
            yield from self._advance()
            yield from self._pull_whole()
        self._flushed_at = self.iteration

    def _pull_whole(self) -> Procedure[None]:
        """Waits for all answers; the local parameters are then the shared ones, whatever the updates keep."""
        for state in self._rounds.values():
            state.merges_at, state.whole = self.iteration, True
        yield from self._pull(self.model.tensors)

    def _look_what_is_due(self) -> None:
        self._nothing_due = not any(map(self._is_due, self.model.tensors))

    def _is_due(self, tensor: WorkerTensor) -> bool:
        merges_at = self._rounds[tensor.name].merges_at
        return merges_at is not None and self.iteration >= merges_at

    # ---- up

    def _exchange_tensors(self, tensors: Sequence[WorkerTensor]) -> Procedure[None]:
        if tensors:  # one large tensor may leave none for the fragment after it
            yield from self._push_changes(tensors)
        for conversation in self._ring:
            yield from self._flush(conversation)

    def _push_changes(self, tensors: Sequence[WorkerTensor]) -> Procedure[None]:
        if any(self._rounds[tensor.name].merges_at is not None for tensor in tensors):
            yield from self._pull(tensors)  # an answer that no forward pass has waited for
        self.check_options()
        fragment = self._fragment(tensors)
        finite = fragment.find_changes()
        self.void = not all(finite)
        self._announce_options()
        if self.void:
            self._refuse_or_warn(tensors[finite.index(False)].name)
            yield from self._push_frames((table, NO_GRADIENT) for tensor in tensors for table in tensor.tables)
        else:
            yield from self._push_frames(fragment.encode())
        for tensor in tensors:
            state = self._rounds[tensor.name]
            state.pushes += 1
            state.merges_at, state.whole = self._updates.merges_at(self.iteration), False
        if self.void:
            self._sit_out_round()

    def check_options(self) -> None:
        """Raises ConfigError where an option of the outer optimizer was changed that all workers have to know."""
        if self._updates.nesterov and self._groups.changed:
            raise ConfigError(
                "the outer optimizer's options were changed, and every worker adds its momentum itself: of "
                "outer_groups the rate alone may change; another momentum is the design's, as in "
                "'diloco[outer_momentum=0.8]'"
            )

    def _sit_out_round(self) -> None:
        """Drops what local steps have changed anywhere in the model: NaN in one fragment is soon in all of them."""
        for tensor in self.model.tensors:
            state = self._rounds[tensor.name]
            if state.merges_at is not None:
                state.merges_at, state.whole = self.iteration + 1, True  # no step before the answer
        rest = [tensor for tensor in self.model.tensors if self._rounds[tensor.name].merges_at is None]
        if rest:
            self._fragment(rest).merge(0.0, 0.0)

    def _refuse_or_warn(self, name: str) -> None:
        if not self._voids:
            raise NonFiniteError(f"local parameters of {name!r} hold NaN or Inf after inner step {self.iteration}")
        self.counters.add("void_rounds", 1)
        caution(
            f"worker {self.rank}: {name!r} holds NaN or Inf after inner step {self.iteration}; this exchange goes "
            "without this worker, which continues from the others' parameters"
        )

    # ---- its state

    def position(self) -> dict[str, Any]:
        return {
            **super().position(),
            "local": asdict(self._updates),
            "coded": coded_by(self._design),
            "flushed_at": self._flushed_at,
            "rounds": {name: asdict(state) for name, state in self._rounds.items()},
            "offsets": {each.name: each.offset.clone() for each in self.model.tensors if each.offset is not None},
        }

    def check_position(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError where what `position` returned is of other local updates, or lacks something."""
        super().check_position(state)
        check_same(state, self._design)
        check_keys(state, ["flushed_at", "rounds", "offsets"], "the state's 'position'")

    def restore_position(self, state: Mapping[str, Any]) -> None:
        """Restores what `position` returned.

        Raises:
            ConfigError: it is of other local updates; nothing was changed.
        """
        super().restore_position(state)
        self._flushed_at = int(state["flushed_at"])
        self._rounds = {name: Round(**each) for name, each in state["rounds"].items()}
        for tensor in self.model.tensors:
            offset = state["offsets"].get(tensor.name)
            # Where the tensor is, which need not be where it was; a copy, for it is written to.
            tensor.offset = None if offset is None else offset.to(tensor.values.device, copy=True)
