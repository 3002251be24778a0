"""A worker's copy of the model and its conversations: how it joins or returns, and waits for updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from thinwire.codecs.scheme import stream_seed
from thinwire.errors import ConfigError, ProtocolError
from thinwire.optimizers.options import ParameterGroups
from thinwire.packets import EncodedTensor
from thinwire.policies.compression import PLAIN
from thinwire.policies.consistency import Consistency, consistency
from thinwire.policies.designs import Design
from thinwire.policies.sampling import Memberships, extended
from thinwire.schema import Plan, Welcome
from thinwire.states import Count, Version, check_sizes, read
from thinwire.telemetry import Counters
from thinwire.worker.conversation import Conversation
from thinwire.worker.effects import Procedure, Receive
from thinwire.worker.model import PlannedTensor, WorkerModel, WorkerTensor
from thinwire.worker.offers import agreed_step
from thinwire.worker.table import WorkerTable
from thinwire.worker.transmit_buffer import CHUNK_NBYTES

Frames = Iterator[tuple[WorkerTable, EncodedTensor]]


class SavedPosition(msgspec.Struct, frozen=True):
    """What `WorkerBase.position` returned."""

    clock: Count
    versions: list[list[Version]]
    memberships: Memberships
    gone: list[Count]
    values: dict[str, torch.Tensor] | None = None
    own: dict[str, torch.Tensor] | None = None


class WorkerBase:
    """A model's tensors at one worker, its conversations with the shards, and where it is in the training.

    Args:
        plans: one for each shard.
        tensors: the model's tensors as planned.
        design: what is sent, both ways.
        groups: rates and options, read at every step.
        rank: this worker's number, 0 … workers − 1.
        now: returns a time in seconds.
        policy: of consistency, where the plans name one that is not installed here.
        chunk_nbytes: a push leaves with so many bytes of frames.
        seed: of random codecs; each rank derives its own stream.
        measures: whether steps are recorded; see `WorkerTable`.

    Attributes:
        iteration: steps taken so far, exchanged or not.
        clock: exchanges so far.
        began: whether a step was taken here.
        began_late: whether it began where the others were, without a state of that step.
        began_bare: whether it began so though all went on together from a step.
        closed: whether this worker has left.
        counters, conversations: bytes, steps and seconds; one for each shard.
        model: every tensor's copy.
        memberships: who divides the data from which iteration on; those of an iteration are known before it begins.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        tensors: Sequence[PlannedTensor],
        design: Design,
        groups: ParameterGroups,
        *,
        rank: int,
        now: Callable[[], float],
        policy: Consistency | None = None,
        chunk_nbytes: int = CHUNK_NBYTES,
        seed: int = 0,
        measures: bool = False,
    ) -> None:
        self.rank, self.iteration, self.clock = rank, 0, 0
        self._own: Mapping[str, torch.Tensor] | None = None
        self._gone_before: frozenset[int] = frozenset()  # of earlier processes
        self.began = self.began_late = self.began_bare = self.closed = False
        self.counters = Counters()
        self._design, self._groups, self._now = design, groups, now
        self._policy = policy or consistency(plans[0].consistency)
        self._terms = self._policy.terms(plans[0].workers)
        # A worker that skips steps with all others checks every gradient before it encodes one.
        self._skips = design.up.nonfinite == "skip" and design.local is None
        self.memberships: Memberships = ((0, tuple(range(plans[0].workers))),)
        self.conversations = [
            Conversation(shard, plan, self._policy, rank=rank, chunk_nbytes=chunk_nbytes)
            for shard, plan in enumerate(plans)
        ]
        self.model = WorkerModel(
            plans,
            tensors,
            design,
            self.counters,
            now,
            seed=stream_seed(seed, rank),
            revocable=self._terms.partial_quorum or self._skips,
            measures=measures,
        )

    # ---- joining

    def agree(self, steps: Sequence[int] = ()) -> Procedure[int]:
        """Joins every shard; returns the step from which this worker continues with all others.

        Without a common clock each worker has its own: then it is the newest of `steps`.

        Args:
            steps: of which this worker holds a state; none: it takes the shards' parameters.

        Raises:
            ConfigError: there is no such step.
        """
        for conversation in self.conversations:
            yield from conversation.join(tuple(steps))
        for conversation in self.conversations:
            yield from conversation.offered()
        trained = [each for each in self.conversations if each.has_parameters] or self.conversations
        while (step := agreed_step({c.shard: c.offer for c in trained if c.offer is not None})) is None:
            busy = next(c.shard for c in trained if c.offer is not None and c.offer.begin >= 0)
            yield Receive(busy, "the other workers, which are to go back to one step")
        return step if self._terms.has_common_clock else max(steps, default=0)

    def check_step(self, step: int) -> None:
        """Raises ConfigError where this worker, which has one state, is not at the step from which all continue."""
        ahead = self._terms.partial_quorum and step > self.clock  # updates were made without this worker
        if self.clock and step != self.clock and not ahead:
            raise ConfigError(
                f"this worker resumes at exchange {self.clock}, and the shards are at {step}: resume all workers and "
                "shards from the same step"
            )

    def start(self, step: int) -> Procedure[None]:
        """Trains from the agreed step on; worker 0's weights become all workers' where all begin."""
        for conversation in self.conversations:
            yield from conversation.resume(max(step, self.clock))
        welcomes: dict[int, Welcome] = {}
        for conversation in self.conversations:
            welcomes[conversation.shard] = yield from conversation.welcomed()
        if any(welcome.elastic for welcome in welcomes.values()):
            self._terms = replace(self._terms, elastic=True)
        if self._terms.has_common_clock:
            self.began_late = self.clock == 0 < step
            self.began_bare = self.began_late and all(c.offer and c.offer.begin < 0 for c in self.conversations)
            self.clock = max(self.clock, step)
        if self.began_late:
            kept = sum(table.residual is not None for table in self.model.trained_tables())
            # Those of the process that had this rank; one above the plan's is the first that has it.
            self.counters.add("residuals_lost", kept * (self.rank < self.conversations[0].plan.workers))
            if not self._terms.partial_quorum:  # with which workers are behind the clock as a rule
                self.iteration = self._policy.iterations(self.clock)
        for conversation in self.conversations:
            if welcomes[conversation.shard].send_values:
                yield from conversation.send_values(self.model.initial_frames(conversation.shard))
        if self.clock and not self._terms.has_common_clock:
            self._resume_apart({shard: welcome.exchanges for shard, welcome in welcomes.items()})
        yield from self.sync()
        if self._terms.partial_quorum:
            # Some tables may have had an update more than all of them: a gradient for it would come too late, and as
            # the update was made before this worker was there, no message would say so.
            newest = [
                v for c in self.conversations for s, v in zip(c.plan.tables, c.versions, strict=True) if not s.state
            ]
            if (clock := max(newest, default=0)) > self.clock:
                self.clock = clock
                yield from self.sync()
        if self._own is not None and not self.began_late:
            self._fill(self._own)  # what it has trained by itself since the last exchange
        self._own = None
        self._follow_members()

    def _resume_apart(self, exchanges: Mapping[int, Sequence[int]]) -> None:
        """Continues with shards at another step than this worker, so that no gradient is applied twice.

        A table that lacks this worker's last gradients continues without them. A table with later gradients contains
        part of this state's residual: the residual is dropped, and those batches are not read again.

        Args:
            exchanges: by shard and table, of how many of this worker's exchanges the gradients were applied.
        """
        clock = self.clock
        for table in self.model.trained_tables():
            had = exchanges[table.shard]
            applied = had[table.index] if had else 0
            if applied > clock:
                table.forget()
            self.counters.add("updates_lost", max(0, clock - applied))
            self.counters.add("residuals_lost", applied > clock)
            self.clock = max(self.clock, applied)
        if self.clock > clock:
            self.iteration = self._policy.iterations(self.clock)
        for conversation in self.conversations:
            conversation.resume_at(self.clock)

    def _statistics(self, conversation: Conversation, clock: int) -> Frames:
        """Returns buffers (batch-norm statistics) that this worker is to send at a clock, every so many exchanges."""
        for tensor in self.model.tensors if conversation.sends_buffers(clock) else ():
            table = tensor.tables[0]
            lacks = table.shard == conversation.shard and conversation.versions[table.index] <= clock
            if tensor.state and lacks:
                tensor.read()
                table.count_push(table.values.nbytes, 0.0)
                yield table, PLAIN.encode(table.array)

    def _follow_members(self) -> None:
        """Notes who divides the data from which iteration on, as one shard with parameters says: all get the same."""
        shards = self.conversations
        said = next((each for each in shards if each.has_parameters), shards[0]).memberships
        if self._terms.runs_apart:  # there is no iteration before which all of them know: each continues from its own
            self.memberships = extended(self.memberships, self.iteration, said[-1][1])
        else:
            self.memberships = tuple((self._policy.iterations(clock), ranks) for clock, ranks in said)

    # ---- what is too old

    def pull(self, tensor: WorkerTensor, *, strict: bool = False) -> Procedure[None]:
        """Waits until a tensor is as recent as the policy asks for (`strict`: up to date); applies what has come."""
        if self.model.evaluating or not (self._terms.accepts_newer or self._is_stale(tensor, strict=strict)):
            return
        applied = False
        for table in tensor.tables:
            conversation = self.conversations[table.shard]
            asked = self._now()
            updates = yield from conversation.pull(table.index, self.clock, strict=strict)
            table.cost.wait_s += self._now() - asked
            table.apply(updates, self.model.local_step, step=self.iteration - 1)
            table.staleness = 0 if tensor.state else max(0, self.clock - conversation.versions[table.index])
            applied = applied or bool(updates)
        if applied:
            tensor.write()

    def sync(self) -> Procedure[None]:
        """Waits for, and applies, everything up to the last step."""
        self.check_open()
        for tensor in self.model.tensors:
            yield from self.pull(tensor, strict=True)

    def check_open(self) -> None:
        """Raises ProtocolError once this worker has left."""
        if self.closed:
            raise ProtocolError("this worker has left the training; close() was called")

    def _is_stale(self, tensor: WorkerTensor, *, strict: bool = False) -> bool:
        return any(
            self.conversations[table.shard].is_stale(table.index, self.clock, strict=strict) for table in tensor.tables
        )

    # ---- its state

    def take_residuals(self, state: Mapping[str, Any]) -> None:
        """Restores residuals and random streams of an earlier step, of a worker that went on where the others are."""
        self.model.load_residuals(state)
        self.counters.add("residuals_carried", self.counters["residuals_lost"])
        self.counters.add("residuals_lost", -self.counters["residuals_lost"])

    @property
    def gone(self) -> frozenset[int]:
        """The workers that went: a worker with such a rank now came late, though memberships may not show it."""
        return self._gone_before.union(*(each.gone for each in self.conversations))

    def position(self) -> dict[str, Any]:
        """Returns the clock and the versions of all tables; and the parameters, where no shard has them."""
        state: dict[str, Any] = {
            "clock": self.clock,
            "versions": [list(each.versions) for each in self.conversations],
            "memberships": self.memberships,
            "gone": sorted(self.gone),
        }
        if self._design.downlink == "gradient":
            state["values"] = self._copies()
        elif self._design.downlink == "weights" and self.iteration != self._policy.iterations(self.clock):
            state["own"] = self._copies()  # shards have the averages of the last exchange
        return state

    def _copies(self) -> dict[str, torch.Tensor]:
        return {each.name: each.values.clone() for each in self.model.tensors if not each.state}

    def check_position(self, state: Mapping[str, Any]) -> SavedPosition:
        """Returns what `position` returned as a record.

        Raises:
            ConfigError: it is of another training or model, or of another number of shards where these matter.
        """
        saved = read(SavedPosition, state, "a worker's position")
        has_model = self._design.downlink == "gradient"
        if has_model and saved.values is None:
            raise ConfigError("the state's 'position' lacks 'values'; take one that this version has saved")
        sizes = {tensor.name: tensor.values.numel() for tensor in self.model.tensors if not tensor.state}
        if (copies := saved.values or saved.own) is not None:
            check_sizes(copies, sizes, "parameters")
        if has_model and len(saved.versions) != len(self.conversations):
            raise ConfigError(
                f"the state is of a training with {len(saved.versions)} shards, this one has "
                f"{len(self.conversations)}: with this design workers hold the model, and resume with as many"
            )
        pairs = zip(saved.versions, self.conversations, strict=False)
        if has_model and any(len(versions) != len(each.plan.tables) for versions, each in pairs):
            raise ConfigError("the state is damaged: it has versions of another number of tables")
        return saved

    def restore_position(self, state: Mapping[str, Any]) -> None:
        """Restores what `position` returned, before `start`: the shards must be at the same step.

        Raises:
            ConfigError: as for `check_position`; nothing has changed.
        """
        saved = self.check_position(state)
        self.clock, self.memberships = saved.clock, saved.memberships
        self._gone_before = frozenset(saved.gone)
        self._own = saved.own
        if saved.values is None:  # the shards send all values again, which cannot be wrong
            return
        for conversation, versions in zip(self.conversations, saved.versions, strict=True):
            conversation.versions = versions
        self._fill(saved.values)

    def _fill(self, copies: Mapping[str, torch.Tensor]) -> None:
        for tensor in self.model.tensors:
            if not tensor.state:
                tensor.values.copy_(copies[tensor.name].view(-1))
                tensor.write()
