"""A worker that trains by itself for H steps and then exchanges what that changed with shards. Sans-IO.

The model's parameters are this worker's own (**local**); `WorkerTensor.values` are the **shared** ones θ, equal bit for
bit at every worker. After H inner steps the worker pushes the pseudo-gradient Δ = θ − local, the shards answer with the
outer optimizer's step, and the local parameters continue from the new θ (see `local.local_rounds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thinwire.cautions import caution
from thinwire.errors import ConfigError, NonFiniteError, ProtocolError
from thinwire.local.local_rounds import LocalRounds
from thinwire.local.parameters import LocalTensor, SharedParameters, lend
from thinwire.local.rounds import Rounds
from thinwire.optimizers.options import ParameterGroups
from thinwire.policies.designs import Design
from thinwire.schema import Plan
from thinwire.worker.apply_buffer import Update
from thinwire.worker.base import SavedPosition
from thinwire.worker.core import Worker
from thinwire.worker.effects import Procedure
from thinwire.worker.finite import all_finite
from thinwire.worker.fragment import Fragment
from thinwire.worker.model import USED_TOO_EARLY, PlannedTensor, WorkerTensor
from thinwire.worker.table import NO_GRADIENT, WorkerTable


class LocalWorker(Worker):
    """A `Worker` that runs its own optimizer between exchanges. Its `groups` are the outer optimizer's.

    Args:
        plans, tensors, design, groups, **settings: as for `Worker`; the design has `local` set.

    Attributes:
        rounds: the timetable, the shared parameters, and the merge.
    """

    KIND: type[LocalTensor] = LocalTensor

    def __init__(
        self,
        plans: Sequence[Plan],
        tensors: Sequence[PlannedTensor],
        design: Design,
        groups: ParameterGroups,
        **settings: Any,
    ) -> None:
        assert design.local is not None
        self._timetable = Rounds(design.local)
        super().__init__(plans, tensors, design, groups, **settings)
        self._updates = design.local
        # Workers push at the same time. Each begins with another shard, so that no shard's link is to take everybody's
        # first message while the others' are idle.
        first = (self.rank + 1) % len(self.conversations)
        self._ring = [*self.conversations[first:], *self.conversations[:first]]
        self._voids = design.up.nonfinite == "skip"
        tensors_of, every = self.model.tensors, self._timetable.every
        assigned = self._updates.assign([tensor.values.numel() for tensor in tensors_of])
        local = [
            local_tensor(tensor, fragment, self.KIND) for tensor, fragment in zip(tensors_of, assigned, strict=True)
        ]
        self._fragment_of = {each.name: each.fragment for each in local}
        tables = [
            (own.fragment, table, own.change[table.span])
            for own, tensor in zip(local, tensors_of, strict=True)
            for table in tensor.tables
        ]
        self._fragments = [
            Fragment([(table, change) for fragment, table, change in tables if fragment == each], self._now)
            for each in every
        ]
        self.rounds = self._rounds(design, SharedParameters(local, len(every), lend))
        self._timetable.merge_now(self._timetable.every, whole=True)

    def _rounds(self, design: Design, shared: SharedParameters) -> LocalRounds:
        return LocalRounds(design, self._timetable, shared, self)

    @property
    def iteration(self) -> int:
        """Steps taken so far, exchanged or not."""
        return self._timetable.iteration

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self._timetable.iteration = iteration

    @property
    def clock(self) -> int:
        """Exchanges so far."""
        return self._timetable.clock

    @clock.setter
    def clock(self, clock: int) -> None:
        self._timetable.clock = clock

    # ---- the training

    def start(self, step: int) -> Procedure[None]:
        yield from super().start(step)
        for number, fragment in enumerate(self._fragments):
            # One that joins late continues from the version which its first exchange will change. Where that is still
            # to come, its first step waits for it: what others changed is not this worker's to push.
            versions = [self.conversations[table.shard].versions[table.index] for table in fragment.tables]
            self._timetable.exchanges[number] = newest = max([self.clock, *versions])
            if min([newest, *versions]) < newest:
                self._timetable.merge_now([number], whole=True)

    @property
    def idle(self) -> bool:
        return not (self._timetable.to_merge() or self.rounds.shared.evaluating)

    def awaits(self, tensor: WorkerTensor) -> bool:
        return self._is_due(tensor) and not self.rounds.shared.evaluating

    def _is_due(self, tensor: WorkerTensor) -> bool:
        return self._fragment_of[tensor.name] in self._timetable.to_merge()

    def gradient_ready(self, tensor: WorkerTensor) -> Procedure[None]:
        if self.rounds.shared.evaluating:
            raise ProtocolError("shared weights are for evaluation; run backward passes outside the block")
        if self._is_due(tensor):
            raise ProtocolError(USED_TOO_EARLY.format(name=tensor.name))
        yield from ()

    def end_step(self) -> Procedure[None]:
        """Ends an inner step, which the worker's own optimizer has taken; pushes the fragment that is due."""
        self.check_open()
        yield from self.rounds.end_step()
        self._note_step()

    def pull(self, tensor: WorkerTensor, *, strict: bool = False) -> Procedure[None]:
        """Merges a tensor's answer into its local parameters, if it is due, and all that are due with it."""
        if self.awaits(tensor):
            yield from self.rounds.continue_due()

    def sync(self) -> Procedure[None]:
        self.check_open()
        if not self.rounds.shared.evaluating:
            yield from self.rounds.wait(self._timetable.every)

    def flush(self) -> Procedure[None]:
        yield from self.rounds.flush()

    # ---- the exchange, as `LocalRounds` asks for it

    def begin_exchange(self, fragments: Sequence[int]) -> Procedure[bool]:
        """Pushes changes; nothing in their place where one holds NaN or Inf, so that the others' go on without them.

        Raises:
            NonFiniteError: one does, and such exchanges are not skipped.
        """
        self.check_options()
        tensors = self.rounds.shared.of(fragments)
        finite = all_finite(tensor.take_change() for tensor in tensors)
        self._announce_options()
        if void := not all(finite):
            self._refuse_or_warn(tensors[finite.index(False)].name)
        for fragment in (self._fragments[each] for each in fragments):
            if void:
                yield from self._push_frames((table, NO_GRADIENT) for table in fragment.tables)
            elif fragment.tables:  # one large tensor may leave none for the fragment after it
                yield from self._push_frames(fragment.encode())
        for conversation in self._ring:
            yield from self._flush(conversation)
        return not void

    def take_averages(self, fragments: Sequence[int]) -> Procedure[Sequence[int]]:
        """Applies the shards' answers; they refuse none."""
        for fragment in fragments:
            pulled: list[tuple[WorkerTable, Sequence[Update]]] = []
            version = self._timetable.exchanges[fragment]
            for shard, tables in self._fragments[fragment].by_shard.items():
                asked, indices = self._now(), [table.index for table in tables]
                found = yield from self.conversations[shard].pull_all(indices, [version] * len(tables), strict=True)
                waited = (self._now() - asked) / len(tables)
                for table, each in zip(tables, found, strict=True):
                    table.cost.wait_s += waited
                    pulled.append((table, each))
            self._fragments[fragment].apply(pulled, self.iteration - 1)
        return ()

    def end_round(self) -> None:
        """Moves the transmit buffers to the next clock."""
        for conversation in self.conversations:
            conversation.transmit.end_step()

    def check_options(self) -> None:
        """Raises ConfigError where an option of the outer optimizer was changed that all workers have to know."""
        if self._updates.nesterov and self._groups.changed:
            raise ConfigError(
                "the outer optimizer's options were changed, and every worker adds its momentum itself: of "
                "outer_groups the rate alone may change; another momentum is the design's, as in "
                "'diloco[outer_momentum=0.8]'"
            )

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
        return {**super().position(), **self.rounds.state_dict()}

    def check_position(self, state: Mapping[str, Any]) -> SavedPosition:
        """As of any worker; raises ConfigError, too, where the state is of other local updates."""
        saved = super().check_position(state)
        self.rounds.check_state(state)
        return saved

    def restore_position(self, state: Mapping[str, Any]) -> None:
        super().restore_position(state)
        self.rounds.load_state_dict(state)


def local_tensor(tensor: WorkerTensor, fragment: int, kind: type[LocalTensor] = LocalTensor) -> LocalTensor:
    """Returns a tensor as local rounds see it, with the same shared values."""
    local = kind(tensor.name, tensor.parameter, fragment, tensor.sends_some)
    local.values, local.change = tensor.values, torch.empty_like(tensor.values)
    for table in tensor.tables:
        if table.residual is not None:
            local.withheld.append((table.span.start, table.span.stop, table.residual))
        if table.outer is not None:
            local.momenta.append((table.span, table.outer))
    return local
