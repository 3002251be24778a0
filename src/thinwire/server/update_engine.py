"""The update engine of one plan: gradients in, updates of tables, and what of them is sent to whom.

Updates happen table by table, so an early layer's never waits for a late one's gradient: each when as many gradients
are in as the consistency policy asks for. What travels down is encoded once for all workers that hold the same copy.
It knows workers by rank, and nothing of peers, sessions, or who is there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thinwire.codecs.tensors import FloatArray
from thinwire.errors import ConfigError, ProtocolError
from thinwire.optimizers.options import Options, apply_changes, changes
from thinwire.optimizers.runner import OptimizerRunner, Settings
from thinwire.packets import EncodedTensor
from thinwire.policies.consistency import Terms, consistency
from thinwire.schema import Delta, Message, Plan, Push, Values
from thinwire.server.agreement import usable_codecs
from thinwire.server.rounds import Digests
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

    Raises:
        ProtocolError: codecs or an optimizer that cannot be used, or tables that do not fit the memory.
    """

    def __init__(self, plan: Plan) -> None:
        codecs = usable_codecs(plan)
        self.plan = plan
        self.terms = consistency(plan.consistency).terms(plan.workers)
        try:
            self.tables = [
                Table(spec, codecs[spec.up], codecs[spec.down], self.terms, plan.downlink) for spec in plan.tables
            ]
        except (MemoryError, RuntimeError) as error:  # NumPy's and torch's ways to say so
            raise ProtocolError(f"the tables do not fit the server's memory: {error}") from error
        self.final: int | None = None
        """The version with which the training ends, once worker 0 has announced it."""
        self._optimizer: OptimizerRunner | None = None
        trained = [(table.spec.group, table.values) for table in self.tables if not table.spec.state]
        if trained:
            self._optimizer = OptimizerRunner(plan.optimizer, plan.groups, trained)
        self._hyperparameters = Hyperparameters(plan, self.terms)
        self._digests = Digests()

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
        settings = self._hyperparameters.take(rank, push)
        self._note(rank, push)
        ready: list[int] = []
        relayed: list[tuple[int, EncodedTensor]] = []
        for index, frame in zip(push.tables, frames, strict=True):
            table = self._table(index)
            if table.spec.state:
                relayed.append((index, self._relay(rank, table, push.step, frame)))
            elif self.terms.immediate:
                table.add(rank, frame, table.incoming.clock)
                ready.append(index)
            elif not self._late(rank, table, push.step):
                table.add(rank, frame, push.step)
                if settings is not None:
                    self._hyperparameters.set(push.step, settings)
                if table.incoming.complete:
                    ready.append(index)
                elif left and (reason := self._unreachable(table, left)):
                    raise StepUnreachable(reason)
        outgoing = self._relayed(push.step + 1, relayed)
        if self.terms.immediate:
            assert settings is not None  # there, everybody's count
            return outgoing + self._answer(rank, ready, settings)
        while ready:
            outgoing += self._update(ready)
            # Gradients of the next clock may have been waiting already.
            ready = [index for index in ready if self.tables[index].incoming.complete]
        self._hyperparameters.forget_before(self.step)
        return outgoing

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
        absent = [rank for rank in left if not table.incoming.has(rank)]
        if not absent or self.plan.workers - len(absent) >= self.terms.quorum:
            return None
        return (
            f"worker {absent[0]} has left before step {table.version}, with which the others go on; "
            "all workers must take the same number of steps"
        )

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Tables, versions, copies, residuals and the optimizer's state, where every parameter has one version.

        Gradients that came for the next version are not in it, nor are changed rates and options: workers
        that go on from here send both again.

        Raises:
            ConfigError: updates are made of single pushes, or tables have different versions.
        """
        versions = {table.version for table in self.tables if not table.spec.state}
        if self.terms.immediate or len(versions) > 1:
            raise ConfigError(
                f"consistency {self.plan.consistency}: tables have versions {sorted(versions)}; a checkpoint is taken "
                "where all have one, which a policy that applies each push by itself does not give"
            )
        return {
            "final": self.final,
            "tables": [table.state_dict() for table in self.tables],
            "updater": None if self._optimizer is None else self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.final = state["final"]
        for table, saved in zip(self.tables, state["tables"], strict=True):
            table.load_state_dict(saved)
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["updater"])

    def begin(self, rank: int) -> None:
        """A worker joins: the changes of its options count from the plan's on."""
        self._hyperparameters.joined(rank)

    # ---- one message

    def _note(self, rank: int, push: Push) -> None:
        """Notes worker 0's announcement of the end, and compares digests."""
        if rank == 0 and push.last and self.final is None:
            # Where updates are made without worker 0, they may be ahead of it.
            clocks = [table.incoming.clock for table in self.tables if not table.spec.state]
            self.final = max(push.step, *clocks, 0) + 1
        if push.digest:
            self._digests.add(rank, push.step, push.digest)

    def _late(self, rank: int, table: Table, clock: int) -> bool:
        """Whether this gradient came too late, under a policy that allows that. Raises ProtocolError where none may."""
        name, current = table.spec.name, table.incoming.clock
        if clock < current and self.terms.quorum < self.terms.workers:
            return True  # the update that was made without it says so
        if not current <= clock <= current + self.terms.lead:
            raise ProtocolError(f"a gradient of step {clock} came for {name!r}, which is at step {current}")
        if table.incoming.has(rank, clock):
            raise ProtocolError(f"{name!r} got two gradients for step {clock}")
        return False

    def _relay(self, rank: int, table: Table, step: int, frame: EncodedTensor) -> EncodedTensor:
        if rank != 0:
            raise ProtocolError(f"buffer {table.spec.name!r} comes from worker 0 alone")
        newest = max((other.version for other in self.tables if not other.spec.state), default=MAX_STEP)
        if not table.version <= step <= newest + self.terms.lead and not self.terms.immediate:
            raise ProtocolError(f"buffer {table.spec.name!r} of step {step} came between {table.version} and {newest}")
        table.assign(frame, step + 1)
        return frame

    def _relayed(self, version: int, relayed: list[tuple[int, EncodedTensor]]) -> list[Outgoing]:
        """Buffers go to everybody as they came."""
        if not relayed:
            return []
        delta = Delta(version=version, tables=tuple(index for index, _ in relayed))
        return [Outgoing(delta, tuple(frame for _, frame in relayed))]

    # ---- updates

    def _aggregate(self, ready: list[int], settings: Settings) -> list[tuple[int, FloatArray | None, tuple[int, ...]]]:
        """Ends the current clock of some tables, and updates the model where that is the server's to do."""
        assert self._optimizer is not None
        taken = [(index, *self.tables[index].incoming.take(self.plan.reduce)) for index in ready]
        if self.plan.downlink == "delta":
            changed = [(self.tables[index], gradient) for index, gradient, _ in taken if gradient is not None]
            self._optimizer.set(settings)
            self._optimizer.step([t.values for t, _ in changed], [torch.from_numpy(g) for _, g in changed])
        return taken

    def _update(self, ready: list[int]) -> list[Outgoing]:
        """One update of each of these tables for everybody; tables that took the same turn share a message."""
        messages: dict[tuple[int, tuple[int, ...]], list[tuple[int, EncodedTensor]]] = {}
        settings = self._hyperparameters.at(self.tables[ready[0]].incoming.clock)
        here = self.plan.downlink == "delta"  # the optimizer runs here, and nobody else need know
        for index, gradient, ranks in self._aggregate(ready, settings):
            table = self.tables[index]
            [(_, frame)] = table.publish(gradient)
            some = ranks if ranks != tuple(range(self.plan.workers)) else ()
            messages.setdefault((table.version, some), []).append((index, frame))
        outgoing: list[Outgoing] = []
        for (version, some), sent in messages.items():
            # The forward pass needs the first tables first.
            sent.sort()
            delta = Delta(
                version=version,
                tables=tuple(index for index, _ in sent),
                last=self.final is not None and version >= self.final,
                ranks=some,
                rates=() if here else settings.rates,
                options=() if here else changes(self.plan.groups, settings.groups),
            )
            outgoing.append(Outgoing(delta, tuple(frame for _, frame in sent)))
        return outgoing

    def _answer(self, rank: int, ready: list[int], settings: Settings) -> list[Outgoing]:
        """One update of each of these tables, and its sender's own way to the new version."""
        bases = {index: self.tables[index].given[rank] for index in ready}
        messages: dict[tuple[int, int], list[tuple[int, EncodedTensor]]] = {}
        for index, gradient, _ in self._aggregate(ready, settings):
            table = self.tables[index]
            [(_, frame)] = table.publish(gradient, {rank})
            messages.setdefault((table.version, bases[index]), []).append((index, frame))
        outgoing: list[Outgoing] = []
        for (version, base), sent in messages.items():
            delta = Delta(
                version=version,
                base=base,
                tables=tuple(index for index, _ in sent),
                last=self.final is not None,
                ranks=(rank,),
            )
            outgoing.append(Outgoing(delta, tuple(frame for _, frame in sent), rank))
        return outgoing

    def _table(self, index: int) -> Table:
        if not 0 <= index < len(self.tables):
            raise ProtocolError(f"table {index}; there are {len(self.tables)}")
        return self.tables[index]


class Hyperparameters:
    """What the updates of the current clock and of those ahead of it go by.

    Args:
        plan: has the options with which every worker begins.
        terms: says whose rates and options count.
    """

    def __init__(self, plan: Plan, terms: Terms) -> None:
        self._plan, self._terms = plan, terms
        self._options: dict[int, tuple[Options, ...]] = {}
        self._at_clock: dict[int, Settings] = {}

    def joined(self, rank: int) -> None:
        """A worker joins: the changes of its options count from the plan's on."""
        self._options.pop(rank, None)

    def take(self, rank: int, push: Push) -> Settings | None:
        """Returns what a push says of them; None where this worker's do not count.

        Raises:
            ProtocolError: another number of rates than of parameter groups, or options that may not change.
        """
        if not self._terms.owns_hyperparameters(rank):
            return None
        if len(push.rates) != len(self._plan.groups):
            raise ProtocolError(f"{len(push.rates)} learning rates came for {len(self._plan.groups)} groups")
        options = self._options.get(rank, self._plan.groups)
        if push.options:
            options = self._options[rank] = apply_changes(self._plan.optimizer, options, push.options)
        return Settings(push.rates, options)

    def set(self, clock: int, settings: Settings) -> None:
        """Fixes what the updates of a clock go by: the first settings that come for it."""
        self._at_clock.setdefault(clock, settings)

    def at(self, clock: int) -> Settings:
        """Returns what the updates of a clock go by."""
        return self._at_clock[clock]

    def forget_before(self, step: int) -> None:
        """Drops clocks that are over, and keeps at least one."""
        while len(self._at_clock) > 1 and (oldest := min(self._at_clock)) < step:
            del self._at_clock[oldest]
