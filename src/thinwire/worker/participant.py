"""How one worker begins, rejoins after a shard was lost, and waits for parts of the model that are too old."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from thinwire.codecs.scheme import stream_seed
from thinwire.errors import ConfigError, ProtocolError, SessionLostError, check_keys
from thinwire.optimizers.options import ParameterGroups
from thinwire.packets import EncodedTensor
from thinwire.policies.compression import PLAIN
from thinwire.policies.consistency import Consistency, consistency
from thinwire.policies.designs import Design
from thinwire.policies.sampling import Memberships, extended
from thinwire.schema import Plan, Welcome
from thinwire.telemetry import Counters
from thinwire.worker.conversation import Conversation
from thinwire.worker.effects import Procedure
from thinwire.worker.model import PlannedTensor, WorkerModel, WorkerTensor
from thinwire.worker.table import NO_GRADIENT, WorkerTable
from thinwire.worker.transmit_buffer import CHUNK_NBYTES

Frames = Iterator[tuple[WorkerTable, EncodedTensor]]


class Participant:
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
        began_late: whether it began without a state, where the others were.
        began_bare: whether it began so though the shards were resumed.
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
        self.began = self.began_late = self.began_bare = self.closed = self._skips_late = False
        self.counters = Counters()
        self._safe = -1
        self._said_saved: tuple[tuple[int, ...] | None, int] | None = None
        self._design, self._groups, self._now = design, groups, now
        self._policy = policy or consistency(plans[0].consistency)
        self._terms = self._policy.terms(plans[0].workers)
        # Whoever skips steps with everybody looks at all gradients before any of them is encoded.
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

    # ---- beginning, and coming back

    def agree(self, steps: tuple[int, ...]) -> Procedure[int]:
        """Joins every shard to go back with all workers; returns the newest step that all of them can go on from.

        Where there is none, and nobody lost anything but connections: that of the shard which is ahead of the others.

        Args:
            steps: that this worker can; none: any, with the shards' parameters.

        Raises:
            ConfigError: there is none.
        """
        for conversation in self.conversations:
            yield from conversation.vote(steps)
        offers = []
        for conversation in self.conversations:
            offers += [(yield from conversation.offered())]
        if common := set(offers[0].steps).intersection(*(offer.steps for offer in offers)):
            return max(common)
        if all(offer.newest >= 0 for offer in offers):
            return max(offer.newest for offer in offers)
        said = "; ".join(
            f"shard {shard}: {' and '.join(map(str, offer.steps)) or 'none'}" for shard, offer in enumerate(offers)
        )
        raise ConfigError(f"there is no step that all shards can go back to with all workers: {said}")

    def start(self, agreed: int | None = None) -> Procedure[None]:
        """Joins every shard, unless a step was agreed on with all of them; worker 0's weights become everybody's."""
        welcomes: dict[int, Welcome] = {}
        for conversation in self.conversations:
            answer = conversation.join(self.clock) if agreed is None else conversation.resume(agreed, self.clock)
            welcomes[conversation.shard] = yield from answer
        if self.clock == 0 and agreed is None:
            self._check_beginning(welcomes)
        if any(welcome.elastic for welcome in welcomes.values()):
            self._terms = replace(self._terms, elastic=True)
        self._skips_late = any(welcome.skips_late for welcome in welcomes.values()) and self._terms.lockstep
        if self._skips_late:
            for table in self.model.trained_tables():
                table.revocable = True
        late = max(welcome.begin for welcome in welcomes.values()) > 0
        own = self.clock
        if self.clock == 0 and not self._terms.immediate:  # there, everybody counts their own exchanges
            # The others may be in the middle of a step, which all shards will have had before ours.
            self.clock = max(max(welcome.step, welcome.begin) for welcome in welcomes.values())
            # With a quorum workers are behind the clock as a rule. At clock 0 a state may be of iterations without one.
            if self.clock and not self._terms.partial_quorum:
                self.iteration = self._policy.iterations(self.clock)
        self.began_late = late or own < self.clock
        self.began_bare = self.began_late and not (late or self._terms.partial_quorum)
        for conversation in self.conversations:
            if welcomes[conversation.shard].send_values:
                yield from conversation.send_values(self.model.initial_frames(conversation.shard))
        if late or self.began_bare:
            kept = sum(table.residual is not None for table in self.model.trained_tables())
            # Those of the process that had this rank; one above the plan's is the first that has it.
            self.counters.add("residuals_lost", kept * (self.rank < self.conversations[0].plan.workers))
        if late:
            # A shard that was resumed, and expects it as it did everybody, does so from its own step on.
            begins = {
                shard: welcome.begin if welcome.begin >= 0 else welcome.step for shard, welcome in welcomes.items()
            }
            yield from self._sit_out(begins)
        if self.clock and self._terms.immediate:
            self._resume_apart({shard: welcome.exchanges for shard, welcome in welcomes.items()})
        yield from self.sync()
        if self._terms.partial_quorum:
            # Some tables may have had an update more than all of them: a gradient for it would come too late, and as
            # the update was made before this worker was there, nobody would say so.
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

    def _check_beginning(self, welcomes: Mapping[int, Welcome]) -> None:
        """Raises SessionLostError, with which all go back, where no worker can be between the steps of the shards.

        One of them has lost updates, and nobody is left who remembers them: every worker begins as this one does.
        """
        steps = {
            each.shard: max(welcomes[each.shard].step, welcomes[each.shard].begin)
            for each in self.conversations
            if not all(spec.state for spec in each.plan.tables)
        }
        apart = self._terms.immediate or self._terms.partial_quorum  # there, others may go on between two answers
        if apart or not steps or max(steps.values()) - min(steps.values()) <= 1 + self._terms.lead:
            return
        said = " and ".join(f"shard {shard} at {step}" for shard, step in steps.items())
        raise SessionLostError(f"the shards are at steps that no worker has been between: {said}; all go back")

    def _resume_apart(self, exchanges: Mapping[int, Sequence[int]]) -> None:
        """Goes on with shards that are not at this worker's step, so that nothing is applied twice.

        A table that lacks this worker's last gradients goes on without them. One that has had later gradients has had
        part of what the residual of this state holds: the residual is dropped, and those batches are not read again.

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

    def _sit_out(self, begins: Mapping[int, int]) -> Procedure[None]:
        """Pushes nothing at the clocks before the first at which all shards expect this worker, which is late."""
        # Clock by clock, as the others do: they may wait for this worker at one shard before they speak to another.
        for clock in range(max(0, min(begins.values())), self.clock):
            for conversation in self.conversations:
                if begins[conversation.shard] > clock:
                    continue
                tables = [i for i, spec in enumerate(conversation.plan.tables) if not spec.state]
                for index in tables:
                    yield from self._catch_up(conversation, index, clock)
                if self._design.share_scales:
                    yield from conversation.share_maxima(clock, (0.0,) * len(conversation.plan.tables))
                for index in tables:
                    conversation.push(clock, index, NO_GRADIENT)
                for index in range(len(conversation.plan.tables)) if conversation.speaks(clock) else ():
                    yield from self._catch_up(conversation, index, clock)
                for table, frame in self._statistics(conversation, clock):
                    conversation.push(clock, table.index, frame)
                # Where others' rates count, too: this worker's may be what its optimizer was built with.
                yield from conversation.flush(clock, () if self._terms.others_speak else self._groups.rates)
                conversation.transmit.end_step()

    def _catch_up(self, conversation: Conversation, index: int, clock: int) -> Procedure[None]:
        updates = yield from conversation.pull(index, clock, strict=True)
        for tensor in self.model.tensors:
            for table in tensor.tables:
                if (table.shard, table.index) == (conversation.shard, index):
                    table.apply(updates, self.model.local_step, step=clock)
                    tensor.write()

    def _statistics(self, conversation: Conversation, clock: int) -> Frames:
        """Returns buffers (batch-norm statistics) that this worker is to send at a clock, every so many exchanges."""
        for tensor in self.model.tensors if conversation.speaks(clock) else ():
            table = tensor.tables[0]
            lacks = table.shard == conversation.shard and conversation.versions[table.index] <= clock
            if tensor.state and lacks:
                tensor.read()
                table.count_push(table.values.nbytes, 0.0)
                yield table, PLAIN.encode(table.array)

    def _follow_members(self) -> None:
        """Notes who divides the data from which iteration on, as one shard with parameters says: all hear the same."""
        shards = self.conversations
        said = next(
            (each for each in shards if not all(spec.state for spec in each.plan.tables)), shards[0]
        ).memberships
        if self._terms.immediate or self._terms.partial_quorum:
            # Workers run apart: there is no iteration before which all of them know. Each goes on from where it is.
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

    def announce_saved(self, steps: Collection[int]) -> Procedure[int | None]:
        """Tells all shards which steps this worker has checkpoints of, where that is news.

        Args:
            steps: all of them, with the beginning where it can go back to that.

        Returns:
            The newest step that everybody has, as far as is known here, or −1: it and all later ones are to be kept.
            None where not all shards are known to write any, or no step is the same for all: the last two are enough.
        """
        if self._terms.immediate:
            return None
        shards = [{*each.saved} for each in self.conversations if each.saved is not None]
        all_write = len(shards) == len(self.conversations)
        if all_write:
            common = set.intersection(*shards)
            self._safe = max(self._safe, -1, *(common if self.began_late else common.intersection(steps)))
        said = None if self.began_late else tuple(sorted(steps, reverse=True))
        if (said, self._safe) != self._said_saved:
            self._said_saved = said, self._safe
            for conversation in self.conversations:
                yield from conversation.announce_saved(said, self._safe)
        return self._safe if all_write else None

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
        check_keys(state, ["contexts"])
        self.model.load_residuals(state["contexts"])
        self.counters.add("residuals_carried", self.counters["residuals_lost"])
        self.counters.add("residuals_lost", -self.counters["residuals_lost"])

    @property
    def gone(self) -> frozenset[int]:
        """The workers that went: whoever has such a rank now came late, though memberships may not show it."""
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

    def check_position(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError where what `position` returned is of another training, or lacks something."""
        of_design = ["values"] if self._design.downlink == "gradient" else []
        check_keys(state, ["clock", "versions", "memberships", "gone", *of_design], "the state's 'position'")

    def restore_position(self, state: Mapping[str, Any]) -> None:
        """Restores what `position` returned, before `start`: the shards must be at the same step.

        Raises:
            ConfigError: the state is of another number of shards, or of another model; nothing has changed.
        """
        self.check_position(state)
        copies = state.get("values", state.get("own"))
        if copies is not None:
            sizes = {tensor.name: tensor.values.numel() for tensor in self.model.tensors if not tensor.state}
            held = {name: values.numel() for name, values in copies.items()}
            if "values" in state and len(state["versions"]) != len(self.conversations):
                raise ConfigError(
                    f"the state is of a training with {len(state['versions'])} shards, this one has "
                    f"{len(self.conversations)}: with this design workers hold the model, and resume with as many"
                )
            if strangers := [name for name in {**sizes, **held} if sizes.get(name) != held.get(name)]:
                raise ConfigError(
                    f"the state is of another model: {strangers[0]!r} has {held.get(strangers[0], 0)} values "
                    f"in it, and {sizes.get(strangers[0], 0)} here"
                )
        self.clock = int(state["clock"])
        self.memberships = state["memberships"]
        self._gone_before = frozenset(state["gone"])
        self._own = state.get("own")
        if "values" not in state:  # the shards send all values again, which cannot be wrong
            return
        for conversation, versions in zip(self.conversations, state["versions"], strict=True):
            conversation.versions = list(versions)
        self._fill(state["values"])

    def _fill(self, copies: Mapping[str, torch.Tensor]) -> None:
        for tensor in self.model.tensors:
            if not tensor.state:
                tensor.values.copy_(copies[tensor.name].view(-1))
                tensor.write()
