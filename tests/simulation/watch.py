"""What must hold at every moment, checked from outside: messages, versions, values, residuals.

It sees what workers say and hear, what a shard's core takes and answers, and the public state of both.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulation.ledgers import (
    Array,
    Said,
    Shard,
    TableLedger,
    Violation,
    bits_of,
    close,
    require,
    same,
    values_of,
)
from tests.simulation.scenario import Scenario
from thinwire.packets import EncodedTensor
from thinwire.policies.consistency import consistency
from thinwire.policies.sampling import Memberships
from thinwire.schema import Delta, Merged, Message, Push, Refused, Values
from thinwire.server.core import ServerCore
from thinwire.server.effects import Effect, Send
from thinwire.worker.model import WorkerTensor

if TYPE_CHECKING:
    from tests.simulation.worker import WorkerProcess


class Watch:
    """The rules."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._policy = consistency(scenario.consistency)
        self._terms = self._policy.terms(scenario.workers)
        self._shards: dict[int, Shard] = {}
        self._sent: dict[tuple[WorkerProcess, int], list[Said]] = defaultdict(list)
        self._took: dict[tuple[WorkerProcess, int], int] = defaultdict(int)
        self._peer: dict[tuple[WorkerProcess, int], tuple[Shard, int]] = {}
        self._ledgers: dict[WorkerProcess, dict[tuple[int, int], TableLedger]] = {}
        self._seen: dict[WorkerProcess, list[list[int]]] = {}
        self._ranks: dict[tuple[WorkerProcess, int, int, int], tuple[int, ...]] = {}
        self._missed: dict[WorkerProcess, int] = defaultdict(int)
        self._divided: dict[WorkerProcess, dict[int, Memberships]] = defaultdict(dict)
        self.owner: WorkerProcess | None = None
        """Whose packet a shard is given just now."""

    def shard(self, index: int, core: ServerCore) -> None:
        self._shards[index] = Shard(core)

    # ---- messages

    def says(self, who: WorkerProcess, shard: int, message: Message, frames: tuple[EncodedTensor, ...]) -> None:
        self._sent[who, shard].append((message, frames))
        if isinstance(message, Push) and who in self._ledgers:
            for index, frame in zip(message.tables, frames, strict=True):
                ledger = self._ledgers[who].get((shard, index))
                if ledger is not None:
                    ledger.pushed(message.step, frame)

    def arrives(self, index: int, peer: int, message: Message, frames: tuple[EncodedTensor, ...]) -> None:
        who, shard = self.owner, self._shards[index]
        if who is None:
            return
        number = shard.heard[peer]
        shard.heard[peer] += 1
        known = shard.owners.setdefault(peer, who)
        require(known is who, "session", f"{who.host.name} speaks as {known.host.name}")
        self._peer[who, index] = (shard, peer)
        sent = self._sent[who, index]
        require(number < len(sent), "once", f"{who.host.name} said {len(sent)} messages, the core hears another")
        if not same((message, frames), sent[number]):
            text = f"message {number} of {who.host.name}: it said {sent[number][0]}, the core hears {message}"
            raise Violation("once", text)
        if isinstance(message, Push):
            self._note_push(shard, who.rank, message, frames)

    def _note_push(self, shard: Shard, rank: int, push: Push, frames: tuple[EncodedTensor, ...]) -> None:
        shard.rates[push.step][rank] = push.rates
        for index, frame in zip(push.tables, frames, strict=True):
            table = shard.core.tables[index]
            if table.spec.state or (push.step < table.version and not self._terms.immediate):
                continue  # late: its worker is told so by the update that was made without it
            clock = table.version if self._terms.immediate else push.step
            shard.waiting[index, clock, rank] = values_of(frame, table.spec.shape)

    def answers(self, index: int, effects: list[Effect]) -> None:
        """A shard's core has dealt with an event."""
        shard = self._shards[index]
        updates: dict[tuple[int, int], Delta | Merged] = {}
        for effect in effects:
            if isinstance(effect, Send):
                for peer in effect.peers:
                    shard.told[peer].append((effect.message, effect.frames))
                if isinstance(effect.message, Values) and self._terms.immediate:
                    for table in effect.message.tables:  # a new process of a rank holds what the table is now
                        self._note_copy(shard, table)
                if isinstance(effect.message, Delta | Merged):
                    updates |= {(table, effect.message.version): effect.message for table in effect.message.tables}
        if shard.replaced:
            shard.remember()
        self._check_updates(shard, updates)

    def hears(self, who: WorkerProcess, index: int, message: Message, frames: tuple[EncodedTensor, ...]) -> None:
        if isinstance(message, Refused):
            return
        shard, peer = self._peer[who, index]
        number = self._took[who, index]
        self._took[who, index] += 1
        told = shard.told[peer]
        require(number < len(told), "once", f"{who.host.name} was told {len(told)} messages and hears another")
        if not same((message, frames), told[number]):
            text = f"message {number} to {who.host.name}: the core said {told[number][0]}, it hears {message}"
            raise Violation("once", text)
        if isinstance(message, Delta):
            for table in message.tables:
                self._ranks[who, index, table, message.version] = message.ranks

    # ---- updates

    def _check_updates(self, shard: Shard, updates: dict[tuple[int, int], Delta | Merged]) -> None:
        for index, table in enumerate(shard.core.tables):
            before = shard.versions[index]
            require(table.version >= before, "versions", f"{table.spec.name} goes from {before} to {table.version}")
            if table.spec.state or (table.version == before and not np.array_equal(shard.values[index], table.values)):
                shard.values[index] = table.values.numpy().copy()  # initial values
            if table.version == before or table.spec.state:
                continue
            values: Array | None = shard.values[index]
            for version in range(before + 1, table.version + 1):
                delta = updates.get((index, version))
                require(delta is not None, "updates", f"{table.spec.name}: no worker is told of version {version}")
                assert delta is not None
                gradient = self._aggregate(shard, index, version - 1, delta)
                if values is not None:
                    values = self._updated(shard, index, values, gradient, version - 1, delta)
            shard.versions[index] = table.version
            shard.values[index] = table.values.numpy().copy()
            if values is not None and not close(values, shard.values[index]):
                found, name = shard.values[index].tolist(), f"{table.spec.name} {table.version}"
                raise Violation("updates", f"{name}: {found}; by the gradients that came it is {values.tolist()}")
            self._note_copy(shard, index)

    def _aggregate(self, shard: Shard, index: int, clock: int, delta: Any) -> Array | None:
        """The mean of the gradients in an update, which must be those that came."""
        name = shard.core.tables[index].spec.name
        came = {rank for table, of, rank in shard.waiting if (table, of) == (index, clock)}
        ranks = set(delta.ranks or range(self._scenario.workers)) - {-1}  # that is no rank
        require(
            came == ranks,
            "updates",
            f"{name}, clock {clock}: gradients of {sorted(came)} are in, and the update is of {sorted(ranks)}",
        )
        gradients = [shard.waiting.pop((index, clock, rank)) for rank in sorted(ranks)]
        given = [each for each in gradients if each is not None]
        if not given:
            return None
        mean: Array = np.asarray(np.mean(given, axis=0, dtype=np.float64), np.float32)
        return mean

    def _updated(
        self, shard: Shard, index: int, values: Array, gradient: Array | None, clock: int, delta: Any
    ) -> Array | None:
        """The table after an update, where it can be told by hand."""
        plan = shard.core.plan
        assert plan is not None
        if plan.downlink != "delta" or plan.reduce not in ("mean",) or plan.groups[0].get("momentum"):
            return None
        if gradient is None:
            return values
        rates = {each[0] for each in shard.rates[clock].values() if each} if not self._terms.immediate else set()
        rate = rates.pop() if len(rates) == 1 else next(r[0] for c in shard.rates.values() for r in c.values() if r)
        updated: Array = values - np.float32(rate) * gradient
        return updated

    def _note_copy(self, shard: Shard, index: int) -> None:
        """What a worker that has this version must hold, where the shard knows."""
        table, plan = shard.core.tables[index], shard.core.plan
        assert plan is not None
        if plan.downlink == "gradient":
            return
        if self._terms.immediate:
            for rank, version in table.given.items():
                shard.bits[index, version, rank] = bits_of(table.downlink.snapshot(rank), None)
        else:
            shard.bits[index, table.version, -1] = bits_of(table.downlink.snapshot(0), table.momentum)

    # ---- workers

    def began(self, who: WorkerProcess) -> None:
        self._ledgers[who] = {}
        if who.design.local is None and who.design.downlink != "weights":
            tables = [table for table in who.worker.model.trained_tables() if table.context is not None]
            self._ledgers[who] = {(table.shard, table.index): TableLedger(table) for table in tables}
        self._seen[who] = [list(each.versions) for each in who.worker.conversations]
        self._check_copies(who)

    def takes_examples(self, who: WorkerProcess) -> None:
        self._divided[who][who.worker.iteration] = who.worker.memberships

    def used(self, who: WorkerProcess) -> None:
        clock = who.worker.clock
        self._resolve(who)
        needs = self._policy.needs(clock)
        for conversation in who.worker.conversations:
            for spec, version in zip(conversation.plan.tables, conversation.versions, strict=True):
                if not spec.state and not self._terms.immediate:
                    require(
                        needs <= version <= clock,
                        "staleness",
                        f"{who.host.name} at clock {clock} uses version {version} of {spec.name}; {needs} … {clock} "
                        "are allowed",
                    )
        if who.design.downlink != "weights" or self._policy.exchanges(who.worker.iteration - 1):
            self._check_copies(who)

    def computed(self, who: WorkerProcess, tensor: WorkerTensor) -> None:
        for table, gradient in tensor.gradients():
            ledger = self._ledgers[who].get((table.shard, table.index))
            if ledger is not None:
                ledger.pending = ledger.pending + gradient.detach().numpy()

    def ended_step(self, who: WorkerProcess) -> None:
        self._resolve(who)
        for ledger in self._ledgers[who].values():
            ledger.check(who.host.name)

    def synced(self, who: WorkerProcess) -> None:
        self.ended_step(who)
        late = int(who.worker.counters.snapshot().get("late_pushes", 0))
        require(
            late == self._missed[who] or not self._ledgers[who],
            "reported",
            f"{who.host.name}: {self._missed[who]} pushes came too late, and it reports {late}",
        )
        if who.design.downlink != "weights" or self._policy.exchanges(who.worker.iteration - 1):
            self._check_copies(who)

    def waits(self, who: WorkerProcess) -> None:
        """A worker is to wait for a message."""

    def _resolve(self, who: WorkerProcess) -> None:
        """Versions only grow; and what became of pushes whose answers are here."""
        for shard, conversation in enumerate(who.worker.conversations):
            before = self._seen[who][shard]
            for index, version in enumerate(conversation.versions):
                require(version >= before[index], "versions", f"{who.host.name}: {before[index]} to {version}")
            self._seen[who][shard] = list(conversation.versions)
        if self._terms.immediate:
            return
        for (shard, index), ledger in self._ledgers[who].items():
            version = who.worker.conversations[shard].versions[index]
            for clock in [clock for clock in ledger.before if clock < version]:
                ranks = self._ranks.get((who, shard, index, clock + 1), ())
                missed = bool(ranks) and who.rank not in ranks
                self._missed[who] += missed
                ledger.answered(clock, missed=missed)

    def _check_copies(self, who: WorkerProcess) -> None:
        """Equal version, equal bits."""
        for table in who.worker.model.trained_tables():
            known = self._peer.get((who, table.shard))
            if known is None:
                continue
            version = who.worker.conversations[table.shard].versions[table.index]
            key = (table.index, version, who.rank if self._terms.immediate else -1)
            bits = bits_of(table.array, table.outer)
            expected = known[0].bits.setdefault(key, bits)
            if bits != expected:
                elsewhere = np.frombuffer(expected, np.float32).tolist()
                name = f"{who.host.name}: version {version} of {table.spec.name}"
                raise Violation("equal bits", f"{name} is {table.array.tolist()}, and elsewhere {elsewhere}")

    # ---- the end

    def check_division(self) -> None:
        """All knew which ranks divide the data when they took the examples of a step."""
        if (
            not self._divided or self._terms.runs_apart or any(who.went_back for who in self._seen)
        ):  # steps may have been taken twice
            return
        known = max((who.worker.memberships for who in self._divided), key=lambda each: (each[-1][0], each))
        for who, steps in self._divided.items():
            for step, memberships in steps.items():
                took, right = ([each for each in some if each[0] <= step] for some in (memberships, known))
                require(took == right, "data", f"{who.host.name} takes examples of step {step} by {took}, not {right}")

    def check_end(self, *, all_trained: bool) -> None:
        """What must hold once no process does anything any more."""

    def over(self, who: WorkerProcess) -> None:
        for shard in range(self._scenario.shards):
            known = self._peer.get((who, shard))
            if known is not None and known[0] is self._shards[shard]:
                heard, sent = known[0].heard[known[1]], self._sent[who, shard]
                # A goodbye may be lost with its connection: the server then gives the worker up. So may pushes that
                # would come too late: their updates are made and told, and the worker need not hear that it lost them.
                left = [message for message, _ in sent[heard:-1]]
                needed = [message for message in left if not self._overtaken(known[0], message)]
                require(not needed, "once", f"{who.host.name} said {len(sent)} messages, and {heard} were heard")

    def _overtaken(self, shard: Shard, message: Message) -> bool:
        """Whether this is a push whose updates were made without it, where the policy allows that."""
        return (
            self._terms.partial_quorum
            and isinstance(message, Push)
            and all(message.step < shard.versions[table] for table in message.tables)
        )

    def final_bits(self, who: WorkerProcess) -> Any:
        """A worker's model, to be compared with that of a run that nothing disturbed."""
        return {name: value.detach().numpy().tobytes() for name, value in who.model.named_parameters()}
