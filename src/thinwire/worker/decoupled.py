"""A learner: a worker that contributes what its inner steps change, and never waits for another. Sans-IO."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from thinwire.local.decoupled import DecoupledRounds, LearnerTensor
from thinwire.local.local_rounds import LocalRounds
from thinwire.local.parameters import SharedParameters
from thinwire.packets import EncodedTensor
from thinwire.policies.designs import Design
from thinwire.schema import Contribution, Merged
from thinwire.worker.apply_buffer import Update
from thinwire.worker.core import Worker
from thinwire.worker.effects import Poll, Procedure, Receive
from thinwire.worker.finite import all_finite
from thinwire.worker.local_updates import LocalWorker
from thinwire.worker.model import WorkerTensor
from thinwire.worker.table import WorkerTable


class Learner(LocalWorker):
    """A `LocalWorker` of a design with a quorum. Args as for `LocalWorker`.

    Attributes:
        examples: that its inner steps have taken so far.
        last_merge: the first shard's newest; None before.
    """

    KIND = LearnerTensor
    rounds: DecoupledRounds

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.rounds.begin()
        self.examples = 0.0
        self.last_merge: Merged | None = None
        self._contributes_from = 0
        self._sent_at = [(0, 0.0) for _ in self._timetable.every]
        """Inner steps and examples when each fragment was contributed last."""
        self._waiting: dict[WorkerTable, deque[tuple[int, EncodedTensor]]] = defaultdict(deque)
        """Contributions that no version holds yet: the inner steps then, and the frame."""
        tensors = self.rounds.tensors
        self._tables_of = [
            [
                (own, table)
                for own, tensor in zip(tensors, self.model.tensors, strict=True)
                if own.fragment == each
                for table in tensor.tables
            ]
            for each in self._timetable.every
        ]

    def _rounds(self, design: Design, shared: SharedParameters) -> LocalRounds:
        return DecoupledRounds(design, self._timetable, shared, self)

    # ---- the training

    def start(self, step: int) -> Procedure[None]:
        yield from Worker.start(self, step)
        newest = max((version for each in self.conversations for version in each.versions), default=0)
        self._contributes_from = self.iteration + self._updates.h if newest > 0 else 0
        self._begin_anew()
        self._timetable.exchanges[:] = [self.clock] * len(self._timetable.exchanges)

    def _resume_apart(self, exchanges: Mapping[int, Sequence[int]]) -> None:
        for conversation in self.conversations:
            conversation.resume_at(self.clock)

    def _begin_anew(self) -> None:
        self.rounds.begin()
        self._waiting.clear()
        self._sent_at = [(self.iteration, self.examples) for _ in self._timetable.every]

    @property
    def idle(self) -> bool:
        return not self.rounds.shared.evaluating

    def awaits(self, tensor: WorkerTensor) -> bool:
        return False

    def sync(self) -> Procedure[None]:
        """Takes the versions that have come; at the beginning, waits for the first."""
        self.check_open()
        for conversation in self.conversations:
            while (reached := conversation.updates.reached()) is not None and reached < 0:
                yield Receive(conversation.shard, "the initial values")
        if not self.rounds.shared.evaluating:
            yield from self.take_averages(self._timetable.every)
            if self._timetable.is_flushed:
                self._begin_anew()  # bit for bit, without what the sums have rounded

    def pop_merges(self) -> list[Merged]:
        """Returns the merges that came since the last call, as the first shard says."""
        merges = self.conversations[0].merges.copy()
        for conversation in self.conversations:
            conversation.merges.clear()
        self.last_merge = merges[-1] if merges else self.last_merge
        return merges

    # ---- the exchange, as `DecoupledRounds` asks for it

    def begin_exchange(self, fragments: Sequence[int]) -> Procedure[bool]:
        if self.iteration + 1 < self._contributes_from:
            return True
        return (yield from self._contribute(fragments, self.iteration + 1))

    def take_averages(self, fragments: Sequence[int]) -> Procedure[Sequence[int]]:
        """Takes the versions that have come, of these fragments; never waits."""
        for conversation in self.conversations:
            yield Poll(conversation.shard)
        for fragment in fragments:
            self._take(fragment)
        return ()

    def end_exchange(self) -> Procedure[None]:
        """Contributes the rest, and waits for the version that holds all learners' contributions."""
        yield from self._contribute(self._timetable.every, self.iteration, ended=True)
        while waits := [each for each in self.conversations if len(each.over) < len(each.plan.tables)]:
            yield Receive(waits[0].shard, "the other learners, to end their steps")
            for conversation in self.conversations:
                yield Poll(conversation.shard)  # a learner that came back has its steps still to end, at all shards
        for fragment in self._timetable.every:
            self._take(fragment)
        self._begin_anew()

    def _contribute(self, fragments: Sequence[int], step: int, *, ended: bool = False) -> Procedure[bool]:
        self.check_options()
        tensors = cast("list[LearnerTensor]", self.rounds.shared.of(fragments))
        finite = all_finite(tensor.take_change() for tensor in tensors)
        if void := not all(finite):
            self._refuse_or_warn(tensors[finite.index(False)].name)
            if not ended:
                self._sent_at = [(step, self.examples) for _ in self._timetable.every]  # no progress is left anywhere
                return False
        for fragment in fragments:
            before, counted = self._sent_at[fragment]
            self._sent_at[fragment] = step, self.examples
            is_empty = void or step == before
            tables = self._tables_of[fragment]
            frames = dict(self._fragments[fragment].encode()) if tables and not is_empty else {}
            for own, table in tables if frames else ():
                frame = frames[table]
                self._waiting[table].append((step, frame))
                table.decode(frame, own.waiting[table.span].view(table.spec.shape), accumulate=True)
            for shard, some in self._fragments[fragment].by_shard.items():
                conversation = self.conversations[shard]
                some = sorted(some, key=lambda table: table.index)
                message = Contribution(
                    step=step,
                    steps=step - before,
                    examples=self.examples - counted,
                    bases=tuple(conversation.versions[table.index] for table in some),
                    tables=tuple(table.index for table in some),
                    rates=self._groups.rates,
                    ended=ended,
                )
                yield from conversation.contribute(message, [frames.get(table, b"") for table in some])
        return not void

    def _take(self, fragment: int) -> None:
        pulled: list[tuple[WorkerTable, Sequence[Update]]] = []
        for shard, tables in self._fragments[fragment].by_shard.items():
            take = self.conversations[shard].updates.take
            pulled += [(table, found) for table in tables if (found := take(table.index, self.clock))]
        if not pulled:
            return
        updates_of = dict(pulled)
        tensors = {own.name: own for own, table in self._tables_of[fragment] if table in updates_of}
        before = {name: own.shared.clone() for name, own in tensors.items()}
        self._fragments[fragment].apply(pulled, self.iteration - 1)
        merged: dict[str, torch.Tensor] = {}
        for own, table in self._tables_of[fragment]:
            newest = max((update.merged for update in updates_of.get(table, ())), default=-1)
            waiting = self._waiting[table]
            while waiting and waiting[0][0] <= newest:
                _, frame = waiting.popleft()
                whole = merged.setdefault(own.name, torch.zeros_like(own.values))
                table.decode(frame, whole[table.span].view(table.spec.shape), accumulate=True)
        for name, own in tensors.items():
            own.follow(before[name], merged.get(name))
            if not any(self._waiting[table] for each, table in self._tables_of[fragment] if each is own):
                own.waiting.zero_()  # what rounding has left
