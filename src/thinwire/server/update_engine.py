"""The update engine of one plan: gradients in, updates of tables, and what of them is sent to whom.

Updates happen table by table, so an early layer's never waits for a late one's gradient: each when as many gradients
are in as the consistency policy asks for. What travels down is encoded once for all workers that hold the same copy.
It knows workers by rank, and nothing of peers, sessions, or who is there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thinwire.codecs.tensors import FloatArray
from thinwire.errors import ConfigError, ProtocolError
from thinwire.optimizers.options import Options, Settings, apply_changes, changes
from thinwire.optimizers.runner import OptimizerRunner
from thinwire.packets import EncodedTensor
from thinwire.policies.consistency import consistency
from thinwire.schema import Delta, Message, Plan, Push, Values, Welcome
from thinwire.server.agreement import usable_codecs
from thinwire.server.membership import Membership
from thinwire.server.table import Table

MAX_STEP = 2**53
"""For a shard of buffers alone, which no update of its own bounds."""


class StepUnreachable(Exception):
    """A step can never be complete. That is nobody's breach of the conversation, and it ends the training."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for one worker, or (rank None) for everybody who is there."""

    message: Message
    frames: tuple[EncodedTensor, ...] = ()
    rank: int | None = None


class UpdateEngine:
    """The tables of a plan and their updates.

    Args:
        plan: checked already.
        least: with fewer workers no update is made; by default as many as the policy asks for.

    Raises:
        ProtocolError: codecs or an optimizer that cannot be used, or tables that do not fit the memory.
    """

    def __init__(self, plan: Plan, least: int | None = None) -> None:
        codecs = usable_codecs(plan)
        self.plan = plan
        self.terms = consistency(plan.consistency).terms(plan.workers, elastic=least is not None)
        self.members = Membership(plan.workers, self.terms.quorum, least)
        try:
            self.tables = [
                Table(spec, codecs[spec.up], codecs[spec.down], self.terms, plan.downlink, plan.reduce, self.members)
                for spec in plan.tables
            ]
        except (MemoryError, RuntimeError) as error:  # NumPy's and torch's ways to say so
            raise ProtocolError(f"the tables do not fit the server's memory: {error}") from error
        self.exchanges: dict[int, list[int]] = {}
        """Where every push is an update: by rank, of how many exchanges each table has had the worker's gradient."""
        self.final: int | None = None
        """The version with which the training ends, once worker 0 has announced it."""
        self._optimizer: OptimizerRunner | None = None
        trained = [(table.spec.group, table.values) for table in self.tables if not table.spec.state]
        if trained:
            self._optimizer = OptimizerRunner(plan.optimizer, plan.groups, trained)
        self._options: dict[int, tuple[Options, ...]] = {}
        """The options of the workers that changed some, by rank."""
        self._settings: dict[int, tuple[int, Settings]] = {}
        """What the updates of the current clock and of those ahead of it go by: the lowest rank's, and the rank."""

    # ---- who joins, and who is gone

    def admit(self, rank: int, untouched: int = 0) -> int:
        """Expects a worker that was dropped, or was never there, from the first clock that nobody has begun.

        Args:
            rank: whose.
            untouched: before this clock, others have begun without having pushed.

        Returns:
            That clock.
        """
        clock = max((untouched, *(table.incoming.untouched for table in self.tables if not table.spec.state)))
        self.members.admit(rank, clock)
        self.members.divide_data(self.untaken)
        for table in self.tables:
            table.admit(rank)
        return clock

    def drop(self, rank: int) -> list[Outgoing]:
        """Goes on without a worker; returns what is to be sent, where only its gradients were missing."""
        self.members.drop(rank)
        outgoing = self.go_on()
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
        trained = [(index, table) for index, table in enumerate(self.tables) if not table.spec.state]
        for _, table in trained:
            table.incoming.resume()
        return self._update_all([index for index, table in trained if table.incoming.complete])

    def late(self) -> tuple[int, ...]:
        """The workers that the oldest update waits for, where enough others have sent all of it."""
        tables = [table for table in self.tables if not table.spec.state and table.version == self.step]
        if not tables or not self.terms.lockstep:
            return ()
        expected = self.members.expected(self.step)
        late = tuple(rank for rank in expected if not all(table.incoming.has(rank) for table in tables))
        return late if len(expected) - len(late) >= self.members.least else ()

    def go_on_without(self, late: Collection[int]) -> list[Outgoing]:
        """Does not expect these workers until they have said something; returns what is to be sent."""
        for rank in late:
            self.members.suspend(rank)
        return self.go_on()

    def _expect_again(self, rank: int) -> list[Outgoing]:
        """A worker that was late is expected from the first clock that nobody has begun."""
        begin = max((table.incoming.untouched for table in self.tables if not table.spec.state), default=0)
        self.members.admit(rank, begin)
        again = Welcome(send_values=False, step=self.step, begin=begin, elastic=True, skips_late=True)
        return [Outgoing(again, rank=rank), *self.go_on()]

    def begin(self, rank: int) -> None:
        """A worker joins: the changes of its options count from the plan's on."""
        self._options.pop(rank, None)

    def check_versions(self, rank: int, have: Sequence[int]) -> tuple[int, ...]:
        """Returns the version of each table that a worker has which joins late, or resumes; −1 where it has nothing.

        Args:
            rank: whose.
            have: what it says; of another number of tables, that it has nothing.

        Raises:
            ProtocolError: it is ahead of the shard, or lacks updates that nobody can give it any more.
        """
        versions = tuple(have) if len(have) == len(self.tables) else (-1,) * len(self.tables)
        for table, version in zip(self.tables, versions, strict=True):
            if version > table.version:
                raise ProtocolError(
                    f"worker {rank} has version {version} of {table.spec.name!r}, and this shard was resumed at "
                    f"version {table.version}: resume all workers and shards from the same step"
                )
            unknown = self.plan.downlink == "gradient" and not table.spec.state and table.version > 0
            if unknown and version < table.version:
                raise ProtocolError(
                    f"worker {rank} has version {max(0, version)} of {table.spec.name!r} and the others "
                    f"{table.version}; under this design the workers hold the model, and the server cannot give it to "
                    "one that begins or comes back late: resume all workers and shards from the same step"
                )
        return versions

    def catch_up(self, rank: int, have: Sequence[int]) -> list[Outgoing]:
        """Returns the whole tables that a worker lacks which joins late, or resumes.

        Args and Raises: as for `check_versions`.
        """
        versions = self.check_versions(rank, have)
        lacks = [i for i, table in enumerate(self.tables) if versions[i] < table.version or self.terms.immediate]
        if not lacks:
            return []
        give = Table.hand_over if self.terms.immediate else Table.snapshot
        values = Values(tables=tuple(lacks), versions=tuple(self.tables[i].version for i in lacks))
        return [Outgoing(values, tuple(give(self.tables[i], rank) for i in lacks), rank)]

    # ---- what workers send

    def assign(self, message: Values, frames: tuple[EncodedTensor, ...]) -> None:
        """Takes the initial values of every table."""
        if message.tables != tuple(range(len(self.tables))) or len(frames) != len(self.tables):
            raise ProtocolError(f"initial values came for {len(frames)} of {len(self.tables)} tables")
        for table, frame in zip(self.tables, frames, strict=True):
            table.assign(frame, 0)

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
            StepUnreachable: somebody whom this step needs has left.
        """
        if len(push.tables) != len(frames):
            raise ProtocolError(f"{len(push.tables)} tables and {len(frames)} frames in one push")
        settings = self._settings_of(rank, push)
        if push.last and self.final is None and (rank == 0 or self.terms.elastic):
            # Where updates are made without worker 0, they may be ahead of it.
            clocks = [table.incoming.clock for table in self.tables if not table.spec.state]
            self.final = max(push.step, *clocks, 0) + 1
        ready: list[int] = []
        relayed: list[tuple[int, EncodedTensor]] = []
        for index, frame in zip(push.tables, frames, strict=True):
            table = self._table(index)
            if table.spec.state:
                relayed += self._relay(rank, index, table, push.step, frame)
            elif self.terms.immediate:
                table.add(rank, frame, table.incoming.clock)
                self.exchanges.setdefault(rank, [0] * len(self.tables))[index] = push.step + 1
                ready.append(index)
            elif not self._late(rank, table, push.step):
                table.add(rank, frame, push.step)
                if settings is not None and rank <= self._settings.get(push.step, (rank, settings))[0]:
                    self._settings[push.step] = rank, settings
                if table.incoming.complete:
                    ready.append(index)
                elif left and (reason := self._unreachable(table, left)):
                    raise StepUnreachable(reason)
        outgoing = []
        if relayed:  # to everybody, as they came
            delta = Delta(version=push.step + 1, tables=tuple(index for index, _ in relayed))
            outgoing.append(Outgoing(delta, tuple(frame for _, frame in relayed)))
        if self.terms.immediate:
            assert settings is not None  # there, everybody's count
            return outgoing + (self._update(ready, settings, rank) if ready else [])
        if self.members.suspended(rank):
            outgoing += self._expect_again(rank)
        return outgoing + self._update_all(ready)

    # ---- where everything stands

    @property
    def step(self) -> int:
        """Updates that every parameter has had. Buffers, which travel more rarely, do not count."""
        return min((table.version for table in self.tables if not table.spec.state), default=0)

    def unreachable(self, left: Collection[int]) -> str | None:
        """Why a step that has begun can never be complete without those who left, or None."""
        for table in self.tables:
            if not self.terms.immediate and table.incoming.started and (reason := self._unreachable(table, left)):
                return reason
        return None

    def _unreachable(self, table: Table, left: Collection[int]) -> str | None:
        arrived = table.incoming.arrived
        absent = [rank for rank in left if rank not in arrived]
        if not absent or self.members.reachable(table.incoming.clock, arrived, left):
            return None
        return (
            f"worker {absent[0]} has left before step {table.version}, with which the others go on; "
            "all workers must take the same number of steps"
        )

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Tables, versions, copies, residuals and the optimizer's state, where every parameter has one version.

        Gradients that came for the next version are not in it, nor are changed rates and options: workers
        that go on from here send both again. Where every push is an update by itself, any moment will do.

        Raises:
            ConfigError: updates are made of several pushes, and tables have different versions.
        """
        versions = {table.version for table in self.tables if not table.spec.state}
        if len(versions) > 1 and not self.terms.immediate:
            raise ConfigError(
                f"consistency {self.plan.consistency}: tables have versions {sorted(versions)}; a checkpoint is taken "
                "where all have one"
            )
        return {
            "exchanges": {rank: list(each) for rank, each in self.exchanges.items()},
            "final": self.final,
            "memberships": self.members.history,
            "tables": [table.state_dict() for table in self.tables],
            "updater": None if self._optimizer is None else self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.final = state["final"]
        self.exchanges = {rank: list(each) for rank, each in state.get("exchanges", {}).items()}
        for table, saved in zip(self.tables, state["tables"], strict=True):
            table.load_state_dict(saved)
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["updater"])
        saved = state.get("memberships", self.members.history)
        self.members.history = tuple((clock, tuple(ranks)) for clock, ranks in saved)
        self.members.divide_data(self.step)  # whoever was gone is waited for again

    # ---- one message

    def _settings_of(self, rank: int, push: Push) -> Settings | None:
        """Returns the rates and options of a push; None where they do not count and there are none.

        Raises:
            ProtocolError: another number of rates than of parameter groups, or options that may not change.
        """
        if not self.terms.owns_hyperparameters(rank) and not push.rates:
            return None
        if len(push.rates) != len(self.plan.groups):
            raise ProtocolError(f"{len(push.rates)} learning rates came for {len(self.plan.groups)} groups")
        options = self._options.get(rank, self.plan.groups)
        if push.options:
            options = self._options[rank] = apply_changes(self.plan.optimizer, options, push.options)
        return Settings(push.rates, options)

    def _late(self, rank: int, table: Table, clock: int) -> bool:
        """Whether this gradient came too late, under a policy that allows that. Raises ProtocolError where none may."""
        name, current = table.spec.name, table.incoming.clock
        if clock < current and self.terms.quorum < self.terms.workers:
            return True  # the update that was made without it says so
        if not self.members.expects(rank, clock):
            return True  # as here: it was late before, and does not know yet from when on it is expected again
        if not current <= clock <= current + self.terms.lead:
            raise ProtocolError(f"a gradient of step {clock} came for {name!r}, which is at step {current}")
        if table.incoming.has(rank, clock):
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

    # ---- updates

    def _update_all(self, ready: list[int]) -> list[Outgoing]:
        """Updates tables whose gradients are in, for as many clocks as they are."""
        outgoing: list[Outgoing] = []
        while ready:
            # Nobody has pushed of a clock before which all went away who had begun it: it has no settings.
            none = (-1, Settings((0.0,) * len(self.plan.groups), self.plan.groups))
            outgoing += self._update(ready, self._settings.get(self.tables[ready[0]].incoming.clock, none)[1])
            # Gradients of the next clock may have been waiting already.
            ready = [index for index in ready if self.tables[index].incoming.complete]
        while len(self._settings) > 1 and (oldest := min(self._settings)) < self.step:
            del self._settings[oldest]
        return outgoing

    def _aggregate(self, ready: list[int], settings: Settings) -> list[tuple[int, FloatArray | None, tuple[int, ...]]]:
        """Ends the current clock of some tables, and updates the model where that is the server's to do."""
        assert self._optimizer is not None
        taken = [(index, *self.tables[index].incoming.take()) for index in ready]
        if self.plan.downlink == "delta":
            changed = [(self.tables[index], gradient) for index, gradient, _ in taken if gradient is not None]
            self._optimizer.set(settings)
            self._optimizer.step([t.values for t, _ in changed], [torch.from_numpy(g) for _, g in changed])
        return taken

    def _update(self, ready: list[int], settings: Settings, rank: int | None = None) -> list[Outgoing]:
        """Updates each of these tables once; tables that took the same turn share a message.

        Args:
            ready: the tables' indices.
            settings: rates and options of the update.
            rank: of the worker whose push alone is the update, and who alone is led to it; None leads everybody.
        """
        here = self.plan.downlink == "delta"  # the optimizer runs here, and nobody else need know
        messages: dict[tuple[int, int, tuple[int, ...]], list[tuple[int, EncodedTensor]]] = {}
        for index, gradient, ranks in self._aggregate(ready, settings):
            table = self.tables[index]
            if rank is None:
                everybody = ranks == tuple(range(self.plan.workers)) and self.members.highest < self.plan.workers
                base, some, targets = -1, () if everybody else ranks, None
            else:
                base, some, targets = table.given[rank], (rank,), {rank}
            [(_, frame)] = table.publish(gradient, targets, senders=len(ranks))
            messages.setdefault((table.version, base, some), []).append((index, frame))
        outgoing: list[Outgoing] = []
        for (version, base, some), sent in messages.items():
            # The forward pass needs the first tables first.
            sent.sort()
            delta = Delta(
                version=version,
                base=base,
                tables=tuple(index for index, _ in sent),
                last=self.final is not None and (rank is not None or version >= self.final),
                ranks=some,
                rates=() if here else settings.rates,
                options=() if here else changes(self.plan.groups, settings.groups),
            )
            outgoing.append(Outgoing(delta, tuple(frame for _, frame in sent), rank))
        return outgoing

    def _table(self, index: int) -> Table:
        if not 0 <= index < len(self.tables):
            raise ProtocolError(f"table {index}; there are {len(self.tables)}")
        return self.tables[index]
