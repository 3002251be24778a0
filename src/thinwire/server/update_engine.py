"""The update engine of one plan: gradients in, and which updates are made when, of whose gradients.

Each table is updated when as many of its gradients are in as the consistency policy asks for: an early layer's update
never waits for a late layer's gradient. How an update is made and sent is in `updates.py`. The engine knows workers by
rank, and nothing of peers, sessions, or who is there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set

import numpy as np

from thinwire.codecs.tensor_set import Checked
from thinwire.errors import ProtocolError
from thinwire.optimizers.options import LARGEST, Options, Settings, apply_changes
from thinwire.packets import EncodedTensor
from thinwire.policies.compression import PLAIN
from thinwire.policies.consistency import consistency
from thinwire.quantities import moment_text
from thinwire.schema import Delta, Plan, Push
from thinwire.server.rounds import LEFT_BEFORE
from thinwire.server.table import Table
from thinwire.server.updates import CannotGoOn, Outgoing, TableUpdates

MAX_STEP = 2**53
"""For a shard of buffers alone, which no update of its own bounds."""


class UpdateEngine(TableUpdates):
    """The tables of a plan and their updates.

    Args:
        plan: checked already.
        least: with fewer workers no update is made; by default as many as the policy asks for.

    Raises:
        ProtocolError: codecs or an optimizer that cannot be used, or tables that do not fit the memory.
    """

    def __init__(self, plan: Plan, least: int | None = None) -> None:
        super().__init__(plan, least)
        self._options: dict[int, tuple[Options, ...]] = {}
        """The options of the workers that changed some, by rank."""
        self._settings: dict[int, tuple[int, Settings]] = {}
        """What the updates of the current clock and of those ahead of it go by: the lowest rank's, and the rank."""
        self._buffers = frozenset(index for index, table in enumerate(self.tables) if table.spec.state)
        self._places = {index: place for place, index in enumerate(self._indices)}
        self._all = range(len(self._places))

    # ---- who joins, and who is gone

    def admit(self, rank: int, unbegun: int = 0) -> int:
        """Expects a worker that was dropped, or was never there, from the first clock that no worker has begun.

        Args:
            rank: whose.
            unbegun: before this clock, workers have begun without having pushed.

        Returns:
            That clock.
        """
        clock = max(unbegun, self.shard.first_unbegun_clock)
        self.members.admit(rank, clock)
        self.members.divide_data(self.first_undrawn_clock)
        for table in self.tables:
            table.admit(rank)
        return clock

    def awaits(self, rank: int) -> bool:
        """Whether the update under way needs all of a worker's gradients, and nothing that it pushed for it is in."""
        is_due = self.step == self.newest and self.members.expects(rank, self.step)
        return self.terms.lockstep and is_due and not self.shard.has(rank, self.step)

    def drop(self, rank: int) -> list[Outgoing]:
        """Continues without a worker; returns the updates to send where only its gradients were missing."""
        spoke = rank == self.members.lowest
        self.members.drop(rank)
        outgoing = self.go_on()
        if spoke:  # it may have sent gradients alone
            outgoing += self._stand_in(gone=True)
        self.members.divide_data(self.first_undrawn_clock)
        return outgoing

    @property
    def first_undrawn_clock(self) -> int:
        """The first clock for which no worker has drawn examples before the shard's next message reaches it.

        A worker draws the examples of a clock before its forward pass, which waits for all tables but those of the last
        `lead` clocks. Every worker has been told of the tables' oldest version; none of the next.
        """
        return self.step + 2 + self.terms.lead

    def go_on(self) -> list[Outgoing]:
        """Updates the tables that wait for no worker any more; returns the updates to send."""
        if not self.terms.has_common_clock:
            return []
        self.shard.add_in_turn()
        return self._update_all(self._all)

    def begin(self, rank: int) -> None:
        """A worker joins: the changes of its options count from the plan's on."""
        self._options.pop(rank, None)

    # ---- what workers send

    def check_step(self, step: int) -> None:
        """Raises ProtocolError for a step that no worker can have reached."""
        if not self.terms.has_common_clock:
            return  # each worker counts its own steps
        furthest = self.newest + self.terms.lead if self._places else MAX_STEP
        if not 0 <= step <= furthest:
            raise ProtocolError(f"a message of step {step} came; no worker can be beyond step {furthest}")

    # A sum that overflows is Inf, and what follows from it is refused when the update is encoded.
    @np.errstate(over="ignore", invalid="ignore")
    def push(
        self, rank: int, push: Push, frames: tuple[EncodedTensor, ...], *, left: Collection[int]
    ) -> list[Outgoing]:
        """Takes one worker's gradients and buffers; returns the updates to send.

        Args:
            rank: whose.
            push: the message.
            frames: one for each of its tables.
            left: ranks that have left the training.

        Raises:
            ProtocolError: it may not say that.
            CannotGoOn: a worker whose gradient this step needs has left.
        """
        if len(push.tables) != len(frames):
            raise ProtocolError(f"{len(push.tables)} tables and {len(frames)} frames in one push")
        own_clock = not self.terms.has_common_clock
        if (push.last or own_clock) and not 0 <= push.step < MAX_STEP:  # what is kept of it travels on
            raise ProtocolError(f"a push of step {push.step}; steps are 0 … {MAX_STEP - 1}")
        frame_of = dict(zip(push.tables, frames, strict=True))
        settings = self._settings_of(rank, push)
        if push.last and self.final is None:  # of the first worker to say so: worker 0 may have died, or have come late
            # Where updates are made without this worker, they may be ahead of it.
            self.final = max(push.step, self.newest) + 1
        places = sorted(self._places[index] for index in self._trained_of(push, frame_of))
        places = places if own_clock else self._not_late(rank, places, push.step)
        checked, refused = self._check(places, [frame_of[self._indices[place]] for place in places])
        relayed = [
            each
            for index in frame_of
            if index in self._buffers
            for each in self._relay(rank, index, self.tables[index], push.step, frame_of[index])
        ]
        self._receive(rank, dict(zip(places, checked, strict=True)), refused, None if own_clock else push.step)
        outgoing = []
        if relayed:  # to all workers, as they came
            delta = Delta(version=push.step + 1, tables=tuple(index for index, _ in relayed))
            outgoing.append(Outgoing(delta, tuple(frame for _, frame in relayed)))
        if own_clock:
            assert settings is not None  # every worker's count there
            exchanges = self.exchanges.setdefault(rank, [0] * len(self.tables)) if places else []
            for place in places:
                exchanges[self._indices[place]] = push.step + 1
            return outgoing + (self._update(places, settings, rank) if places else [])
        if places and settings is not None and rank <= self._settings.get(push.step, (rank, settings))[0]:
            self._settings[push.step] = rank, settings
        if left and (reason := self._unreachable(places, left)):
            raise CannotGoOn(reason)
        return outgoing + self._update_all(places)

    def unreachable(self, left: Collection[int]) -> str | None:
        """Why a step that has begun can never be complete without those who left, or None."""
        return self._unreachable(self._all, left) if self.terms.has_common_clock else None

    def _unreachable(self, places: Sequence[int], left: Collection[int]) -> str | None:
        for clock, ranks, _ in self.shard.alike(places):
            absent = [rank for rank in left if rank not in ranks]
            if ranks and absent and not self.members.reachable(clock, ranks, left):
                return LEFT_BEFORE.format(rank=absent[0], moment=moment_text(clock, self.steps_from(clock)))
        return None

    def steps_from(self, clock: int) -> int:
        """How many steps workers take from an exchange to the next."""
        policy = consistency(self.plan.consistency)
        return policy.iterations(clock + 1) - policy.iterations(clock)

    # ---- one message

    def _settings_of(self, rank: int, push: Push) -> Settings | None:
        """Returns the rates and options of a push; None where they do not count, and it has none.

        Raises:
            ProtocolError: another number of rates than of parameter groups, or options that may not change.
        """
        if not push.rates and not self.terms.owns_hyperparameters(rank):
            return None
        if len(push.rates) != len(self.plan.groups):
            raise ProtocolError(f"{len(push.rates)} learning rates came for {len(self.plan.groups)} groups")
        if not all(abs(rate) <= LARGEST for rate in push.rates):
            raise ProtocolError(f"a learning rate is {max(push.rates, key=_oddness)}; float32 ends at {LARGEST:.3g}")
        options = self._options.get(rank, self.plan.groups)
        if push.options and self.plan.downlink == "momentum":
            raise ProtocolError(
                "options of the outer optimizer came, whose momentum each end adds; its rate may change"
            )
        if push.options:
            options = self._options[rank] = apply_changes(self.plan.optimizer, options, push.options)
        return Settings(push.rates, options)

    def _trained_of(self, push: Push, frame_of: Mapping[int, EncodedTensor]) -> Set[int]:
        """Returns the tables with gradients in a push. Raises ProtocolError where there is no such table."""
        if unknown := frame_of.keys() - range(len(self.tables)):
            raise ProtocolError(f"table {min(unknown)}; there are {len(self.tables)}")
        if len(frame_of) < len(push.tables):
            twice = next(index for index in frame_of if push.tables.count(index) > 1)
            raise ProtocolError(f"{self.tables[twice].spec.name!r} got two gradients for step {push.step}")
        return frame_of.keys() - self._buffers

    def _not_late(self, rank: int, places: Sequence[int], clock: int) -> list[int]:
        """Returns the places of tables without an update of a clock so far.

        Updates made without this worker's gradient name their ranks. Raises ProtocolError where none may be made so.
        """
        in_time: list[int] = []
        for current, _, some in self.shard.alike(places):
            name = self._trained[some[0]].spec.name
            if clock < current and self.terms.partial_quorum:
                continue
            if not current <= clock <= current + self.terms.lead:
                raise ProtocolError(f"a gradient of step {clock} came for {name!r}, which is at step {current}")
            if self.shard.has(rank, clock, some):
                raise ProtocolError(f"{name!r} got two gradients for step {clock}")
            in_time += some
        return sorted(in_time)

    def _receive(
        self, rank: int, gradients: Mapping[int, Checked], refused: Collection[int], clock: int | None
    ) -> None:
        """Puts gradients into the inbox: of a clock, or (None) of each table's current one."""
        by_clock: dict[int, list[int]] = {}
        for place in gradients:
            by_clock.setdefault(int(self.shard.clocks[place]) if clock is None else clock, []).append(place)
        for each, places in by_clock.items():
            some = [place for place in refused if place in places]
            self.shard.receive(rank, each, places, [gradients[place] for place in places], some)

    def _relay(
        self, rank: int, index: int, table: Table, step: int, frame: EncodedTensor
    ) -> list[tuple[int, EncodedTensor]]:
        another_may = self.terms.elastic or self.terms.partial_quorum  # worker 0 may die
        if rank != 0 and not another_may:
            raise ProtocolError(f"buffer {table.spec.name!r} comes from worker 0 alone")
        if step < table.version and another_may:
            return []  # another worker was ahead of this one, and has died since
        newest = self.newest if self._places else MAX_STEP
        if self.terms.has_common_clock and not table.version <= step <= newest + self.terms.lead:
            raise ProtocolError(f"buffer {table.spec.name!r} of step {step} came between {table.version} and {newest}")
        table.assign(frame, step + 1)
        return [(index, frame)]

    def _stand_in(self, *, gone: bool = False) -> list[Outgoing]:
        """Relays the shard's own buffers where they are due and no worker sends them: in lockstep all wait for them.

        The worker that was to send them was late for that update, has begun after it, or (`gone`) was just dropped.
        """
        step, every = self.step, self.plan.state_interval
        due = (step - 1) // every * every
        if not step or not self.terms.lockstep or (not gone and self.members.expects(self.members.lowest, due)):
            return []
        lacking = [index for index in sorted(self._buffers) if self.tables[index].version <= due]
        sent = tuple(PLAIN.encode(self.tables[index].values.numpy()) for index in lacking)
        for index, frame in zip(lacking, sent, strict=True):
            self.tables[index].assign(frame, due + 1)
        return [Outgoing(Delta(version=due + 1, tables=tuple(lacking)), sent)] if lacking else []

    # ---- updates

    def _update_all(self, places: Sequence[int]) -> list[Outgoing]:
        """Updates tables with complete gradients, clock after clock."""
        outgoing: list[Outgoing] = []
        ready = self.shard.complete(places)
        while ready:
            # A worker that no update waits for any more may have pushed some tables and not others.
            clock = int(self.shard.clocks[ready].min())
            now = [place for place in ready if self.shard.clocks[place] == clock]
            # A clock from which all went away who had begun it has no settings.
            none = (-1, Settings((0.0,) * len(self.plan.groups), self.plan.groups))
            outgoing += self._update(now, self._settings.get(clock, none)[1])
            outgoing += self._stand_in() if self._buffers else []
            # Gradients of the next clock may have been waiting already.
            ready = self.shard.complete(ready)
        while len(self._settings) > 1 and (oldest := min(self._settings)) < self.step:
            del self._settings[oldest]
        return outgoing


def _oddness(rate: float) -> float:
    return math.inf if math.isnan(rate) else abs(rate)
