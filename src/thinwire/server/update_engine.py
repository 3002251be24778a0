"""The update engine of one plan: gradients in, and which updates are made when, of whose gradients.

Updates happen message by message: tables whose gradients came in one share a lane (`lanes.py`), and are updated when as
many gradients are in as the consistency policy asks for. So an early layer's never waits for a late one's gradient.
How an update is made and sent is in `updates.py`. It knows workers by rank, and nothing of peers, sessions, or who is
there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Set

import numpy as np

from thinwire.errors import ProtocolError
from thinwire.optimizers.options import LARGEST, Options, Settings, apply_changes
from thinwire.packets import EncodedTensor
from thinwire.policies.compression import PLAIN
from thinwire.policies.consistency import consistency
from thinwire.quantities import moment_text
from thinwire.schema import Delta, Plan, Push
from thinwire.server.aggregation import Aggregation
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

    # ---- who joins, and who is gone

    def admit(self, rank: int, untouched: int = 0) -> int:
        """Expects a worker that was dropped, or was never there, from the first clock that nobody has begun.

        Args:
            rank: whose.
            untouched: before this clock, others have begun without having pushed.

        Returns:
            That clock.
        """
        clock = max((untouched, *(lane.untouched for lane in self.lanes)))
        self.members.admit(rank, clock)
        self.members.divide_data(self.untaken)
        for table in self.tables:
            table.admit(rank)
        return clock

    def awaits(self, rank: int) -> bool:
        """Whether the update under way needs all of a worker's gradients, and nothing that it pushed for it is in."""
        return self.terms.lockstep and all(
            lane.clock == self.step and self.members.expects(rank, self.step) and not lane.has(rank)
            for lane in self.lanes
        )

    def drop(self, rank: int) -> list[Outgoing]:
        """Goes on without a worker; returns what is to be sent, where only its gradients were missing."""
        spoke = rank == self.members.lowest
        self.members.drop(rank)
        outgoing = self.go_on()
        if spoke:  # it may have sent gradients alone
            outgoing += self._stand_in(gone=True)
        self.members.divide_data(self.untaken)
        return outgoing

    @property
    def untaken(self) -> int:
        """The first clock for which nobody can have taken examples before hearing what is said now.

        Examples of a clock are taken before its forward pass, which waits for all tables but those of the last `lead`
        clocks. Of the tables' oldest version every worker has been told; of the next none has.
        """
        return self.step + 2 + self.terms.lead

    def go_on(self) -> list[Outgoing]:
        """Updates what nobody is waited for any more; returns what is to be sent."""
        if self.terms.immediate:
            return []
        for lane in self.lanes:
            lane.resume()
        return self._update_all(self.lanes)

    def begin(self, rank: int) -> None:
        """A worker joins: the changes of its options count from the plan's on."""
        self._options.pop(rank, None)

    # ---- what workers send

    def check_step(self, step: int) -> None:
        """Raises ProtocolError for a step to which nobody can have come: what is said of it counts when it is there."""
        if self.terms.immediate:
            return  # every worker has its own, and none waits for what others say
        furthest = max((lane.clock for lane in self.lanes), default=MAX_STEP - self.terms.lead) + self.terms.lead
        if not 0 <= step <= furthest:
            raise ProtocolError(f"something came of step {step}; nobody can be beyond step {furthest}")

    # A sum that overflows is Inf, and what follows from it is refused when the update is encoded.
    @np.errstate(over="ignore", invalid="ignore")
    def push(
        self, rank: int, push: Push, frames: tuple[EncodedTensor, ...], *, left: Collection[int]
    ) -> list[Outgoing]:
        """Takes one worker's gradients and buffers; returns what is to be sent.

        Args:
            rank: whose.
            push: the message.
            frames: one for each of its tables.
            left: ranks that have left the training.

        Raises:
            ProtocolError: it may not say that.
            CannotGoOn: somebody whom this step needs has left.
        """
        if len(push.tables) != len(frames):
            raise ProtocolError(f"{len(push.tables)} tables and {len(frames)} frames in one push")
        if (push.last or self.terms.immediate) and not 0 <= push.step < MAX_STEP:  # what is kept of it travels on
            raise ProtocolError(f"a push of step {push.step}; steps are 0 … {MAX_STEP - 1}")
        frame_of = dict(zip(push.tables, frames, strict=True))
        settings = self._settings_of(rank, push)
        if push.last and self.final is None:  # of whoever is first: worker 0 may have died, or have come late
            # Where updates are made without this worker, they may be ahead of it.
            self.final = max(push.step, *(lane.clock for lane in self.lanes), 0) + 1
        lanes = self.lanes.of(self._trained(push, frame_of))
        counted: list[Aggregation] = []
        for lane in lanes:
            if self.terms.immediate or not self._late(rank, lane, push.step):
                clock = lane.clock if self.terms.immediate else push.step
                lane.hold(rank, [frame_of[index] for index in lane.group.indices], clock)
                counted.append(lane)
        relayed = [
            each
            for index in frame_of
            if index in self._buffers
            for each in self._relay(rank, index, self.tables[index], push.step, frame_of[index])
        ]
        for lane in counted:
            lane.resume()
        outgoing = []
        if relayed:  # to everybody, as they came
            delta = Delta(version=push.step + 1, tables=tuple(index for index, _ in relayed))
            outgoing.append(Outgoing(delta, tuple(frame for _, frame in relayed)))
        if self.terms.immediate:
            assert settings is not None  # there, everybody's count
            exchanges = self.exchanges.setdefault(rank, [0] * len(self.tables)) if counted else []
            for index in (index for lane in counted for index in lane.group.indices):
                exchanges[index] = push.step + 1
            return outgoing + (self._update(counted, settings, rank) if counted else [])
        if counted and settings is not None and rank <= self._settings.get(push.step, (rank, settings))[0]:
            self._settings[push.step] = rank, settings
        for lane in counted if left else ():
            if not lane.complete and (reason := self._unreachable(lane, left)):
                raise CannotGoOn(reason)
        return outgoing + self._update_all(counted)

    def unreachable(self, left: Collection[int]) -> str | None:
        """Why a step that has begun can never be complete without those who left, or None."""
        for lane in self.lanes:
            if not self.terms.immediate and lane.started and (reason := self._unreachable(lane, left)):
                return reason
        return None

    def _unreachable(self, lane: Aggregation, left: Collection[int]) -> str | None:
        absent = [rank for rank in left if rank not in lane.arrived]
        if not absent or self.members.reachable(lane.clock, lane.arrived, left):
            return None
        return LEFT_BEFORE.format(rank=absent[0], moment=moment_text(lane.clock, self.steps_from(lane.clock)))

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

    def _trained(self, push: Push, frame_of: Mapping[int, EncodedTensor]) -> Set[int]:
        """Returns the tables of a push whose gradients it holds. Raises ProtocolError where there is no such table."""
        if unknown := frame_of.keys() - range(len(self.tables)):
            raise ProtocolError(f"table {min(unknown)}; there are {len(self.tables)}")
        if len(frame_of) < len(push.tables):
            twice = next(index for index in frame_of if push.tables.count(index) > 1)
            raise ProtocolError(f"{self.tables[twice].spec.name!r} got two gradients for step {push.step}")
        return frame_of.keys() - self._buffers

    def _late(self, rank: int, lane: Aggregation, clock: int) -> bool:
        """Whether gradients came too late, under a policy that allows that. Raises ProtocolError where none may."""
        name, current = lane.group.tables[0].spec.name, lane.clock
        if clock < current and self.terms.quorum < self.terms.workers:
            return True  # the update that was made without it says so
        if not current <= clock <= current + self.terms.lead:
            raise ProtocolError(f"a gradient of step {clock} came for {name!r}, which is at step {current}")
        if lane.has(rank, clock):
            raise ProtocolError(f"{name!r} got two gradients for step {clock}")
        return False

    def _relay(
        self, rank: int, index: int, table: Table, step: int, frame: EncodedTensor
    ) -> list[tuple[int, EncodedTensor]]:
        another_may = self.terms.elastic or self.terms.partial_quorum  # worker 0 may die
        if rank != 0 and not another_may:
            raise ProtocolError(f"buffer {table.spec.name!r} comes from worker 0 alone")
        if step < table.version and another_may:
            return []  # another worker was ahead of this one, and has died since
        newest = max((other.version for other in self.tables if not other.spec.state), default=MAX_STEP)
        if not table.version <= step <= newest + self.terms.lead and not self.terms.immediate:
            raise ProtocolError(f"buffer {table.spec.name!r} of step {step} came between {table.version} and {newest}")
        table.assign(frame, step + 1)
        return [(index, frame)]

    def _stand_in(self, *, gone: bool = False) -> list[Outgoing]:
        """Relays buffers that are due and that nobody sends any more, as they are here: in lockstep all wait for them.

        Whoever was to send them was late for that update, has begun after it, or (`gone`) was just dropped.
        """
        step, every = min((lane.clock for lane in self.lanes), default=0), self.plan.state_interval
        due = (step - 1) // every * every
        if not step or not self.terms.lockstep or (not gone and self.members.expects(self.members.lowest, due)):
            return []
        lacking = [index for index in sorted(self._buffers) if self.tables[index].version <= due]
        sent = tuple(PLAIN.encode(self.tables[index].values.numpy()) for index in lacking)
        for index, frame in zip(lacking, sent, strict=True):
            self.tables[index].assign(frame, due + 1)
        return [Outgoing(Delta(version=due + 1, tables=tuple(lacking)), sent)] if lacking else []

    # ---- updates

    def _update_all(self, lanes: Iterable[Aggregation]) -> list[Outgoing]:
        """Updates tables whose gradients are in, for as many clocks as they are."""
        outgoing: list[Outgoing] = []
        ready = [lane for lane in lanes if lane.complete]
        while ready:
            # Whom nobody waits for any more may have pushed some tables and not others.
            clock = min(lane.clock for lane in ready)
            now = [lane for lane in ready if lane.clock == clock]
            # Nobody has pushed of a clock before which all went away who had begun it: it has no settings.
            none = (-1, Settings((0.0,) * len(self.plan.groups), self.plan.groups))
            outgoing += self._update(now, self._settings.get(clock, none)[1])
            outgoing += self._stand_in() if self._buffers else []
            # Gradients of the next clock may have been waiting already.
            ready = [lane for lane in ready if lane.complete]
        while len(self._settings) > 1 and (oldest := min(self._settings)) < self.step:
            del self._settings[oldest]
        return outgoing


def _oddness(rate: float) -> float:
    return math.inf if math.isnan(rate) else abs(rate)
