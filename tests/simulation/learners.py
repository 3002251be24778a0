"""The rules that hold for learners, which never wait for each other, besides those of all workers.

The watch knows contributions by their messages. It measures grace windows by the shard's clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch

from tests.simulation.hostile import bad_contribution
from tests.simulation.ledgers import (
    Array,
    Book,
    Inbox,
    Shard,
    Violation,
    close,
    contributed_to,
    has_looked,
    mean_of,
    require,
    values_of,
)
from tests.simulation.scenario import Scenario
from tests.simulation.watch import Watch
from tests.simulation.worker import RATE, WorkerProcess, gradients
from thinwire.errors import ProtocolError
from thinwire.local.decoupled import LearnerTensor
from thinwire.packets import EncodedTensor
from thinwire.policies.consistency import Quorum
from thinwire.schema import Contribution, Join, Members, Merged, Message, Welcome
from thinwire.server.effects import Close, Effect, Send
from thinwire.server.shard_state import Presence
from thinwire.worker.decoupled import Learner
from thinwire.worker.model import WorkerTensor

MOMENT_S = 1e-6
DEAD_S = 2.0
"""This long after the time that a server waits, a shard has given up a dead process."""
BAD_SHARE = 0.15
"""Before this share of the contributions a shard hears a bad one."""


class LearnersWatch(Watch):
    """The rules of learners that never wait, besides those of all workers."""

    _policy: Quorum

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._chance = Random(scenario.seed + 2)
        self._inboxes: dict[Shard, dict[int, Inbox]] = defaultdict(lambda: defaultdict(Inbox))
        self._current: dict[Shard, dict[int, WorkerProcess]] = defaultdict(dict)
        self._came: tuple[Shard, WorkerProcess, Contribution, tuple[EncodedTensor, ...]] | None = None
        self._books: dict[WorkerProcess, dict[tuple[int, int], Book]] = {}
        self._begin: dict[WorkerProcess, int] = {}
        self._merged: dict[tuple[WorkerProcess, int, int, int], int] = {}
        self._stepping: set[WorkerProcess] = set()
        self._members: dict[Shard, object] = {}
        self._died: dict[WorkerProcess, float] = {}
        self._ended: list[WorkerProcess] = []
        self._live: dict[int, tuple[int, ...]] = {}

    # ---- shards

    def arrives(self, index: int, peer: int, message: Message, frames: tuple[EncodedTensor, ...]) -> None:
        super().arrives(index, peer, message, frames)
        self._came = None
        if self.owner is not None and isinstance(message, Contribution):
            if self._chance.random() < BAD_SHARE:
                self._say_bad(self._shards[index], self.owner, peer, message, frames)
            self._came = self._shards[index], self.owner, message, frames

    def answers(self, index: int, effects: list[Effect]) -> None:
        shard, came, self._came = self._shards[index], self._came, None
        if shard.replaced:
            self._inboxes.pop(shard, None)
            self._current.pop(shard, None)
        if came is not None and came[0] is shard:
            _, who, message, frames = came
            refused = [each for each in effects if isinstance(each, Close) and shard.owners.get(each.peer) is who]
            require(not refused, "refused", f"{who.host.name} contributed {message}, and {refused}")
            for table, base, frame in zip(message.tables, message.bases, frames, strict=True):
                values = values_of(frame, shard.core.tables[table].spec.shape)
                self._inboxes[shard][table].take(who, message, base, values, shard.core.now())
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Welcome):
                who = shard.owners[effect.peers[0]]
                self._current[shard][who.rank] = who
        # One event may drop several learners, with a merge after each: the next word on members is of that merge.
        self._live, live = {}, None
        for effect in reversed(effects):
            if isinstance(effect, Send) and isinstance(effect.message, Members):
                live = effect.message.ranks
            elif isinstance(effect, Send) and live is not None:
                self._live[id(effect.message)] = live
        super().answers(index, effects)
        if shard.core.plan is not None:
            looks = any(isinstance(each, Send) and has_looked(each.message) for each in effects)
            self._look(shard, looks=came is not None or looks)

    def _missing(self, shard: Shard, inbox: Inbox, now: float | None = None) -> list[int]:
        """Returns the ranks that a shard waits for; with a time, without those that died long before."""
        found = []
        for rank in shard.core._engine.members.ranks:  # type: ignore[union-attr]
            who = self._current[shard].get(rank)
            ended = who in inbox.newest and inbox.newest[who].ended
            # A training of a fixed number expects one that died before it began for as long as it takes.
            expected = shard.core._min_workers is None and shard.core._presence.get(rank) is Presence.EXPECTED
            given_up = now is not None and not expected and self._is_long_dead(who)
            if who not in inbox.waiting and not ended and not given_up:
                found.append(rank)
        return found

    def _is_long_dead(self, who: WorkerProcess | None) -> bool:
        if who is None or who.host.alive:
            return False
        now = who.host.scheduler.now
        return now > self._died.setdefault(who, now) + self._scenario.grace_s + DEAD_S

    def _look(self, shard: Shard, *, looks: bool) -> None:
        """Checks that the shard has merged the tables that are due.

        Args:
            shard: which.
            looks: whether it has looked for due tables. After a join it looks again when that learner begins.
        """
        core, now = shard.core, shard.core.now()
        members = core._engine.members  # type: ignore[union-attr]
        current = self._current[shard]
        comes = any(shard.owners.get(peer) is not current.get(rank) for rank, peer in core.sessions.items())
        if comes and not looks:
            return
        known = set(self._current[shard].values())
        changed = self._members.get(shard) != (there := (members.ranks, frozenset(known)))
        self._members[shard] = there
        for index, table in enumerate(core.tables):
            inbox = self._inboxes[shard][index]
            inbox.last = now if changed else inbox.last
            missing = self._missing(shard, inbox, now)
            if len(members.ranks) < members.least:
                continue
            if not inbox.has_quorum(self._policy.k, missing):
                inbox.until = inbox.late = None
                continue
            if inbox.until is None:
                inbox.until = now + inbox.window(known, now, self._policy.grace)
            if not comes and (not missing or now > inbox.until + MOMENT_S):
                late = inbox.late = now if inbox.late is None else inbox.late
                text = f"{table.spec.name} {table.version}: {[w.host.name for w in inbox.waiting]}, due at {late}"
                require(now <= late + MOMENT_S, "merged late", f"{text}, are not merged at {now}; {missing} are not in")

    def _aggregate(self, shard: Shard, index: int, clock: int, delta: Any) -> Array | None:
        """The mean that a version must be made of, and whether it may be made now."""
        inbox, now, name = self._inboxes[shard][index], shard.core.now(), shard.core.tables[index].spec.name
        missing, until = self._missing(shard, inbox), inbox.until
        known = set(self._current[shard].values())
        text = f"{name} {clock}: {[w.host.name for w in inbox.waiting]} are merged at {now}, {missing} are not in"
        if not delta.ended:
            require(inbox.has_quorum(self._policy.k, missing), "quorum", text)
            if until is None:
                until = now + inbox.window(known, now, self._policy.grace)
            require(not missing or now >= until - MOMENT_S, "merged early", f"{text}; the window ends at {until}")
        if not self._scenario.faults and inbox.waiting and inbox.last:
            slowest = 0.015 * max(self._scenario.slower) + 2 * self._scenario.latency[1]
            most = self._policy.grace + 2 * self._policy.h * slowest
            require(now <= inbox.last + most, "pause", f"{text}; the version before was made at {inbox.last}")
        shares, waiting = inbox.shares(clock, self._policy.discount), dict(inbox.waiting)
        told = dict(zip(delta.ranks, zip(delta.steps, delta.weights, strict=True), strict=True))
        for who in known & waiting.keys():
            step, weight = told.pop(who.rank, (-1, -1.0))
            require(
                step == inbox.newest[who].step and abs(weight - shares[who]) < 1e-6,
                "weights",
                f"{text}: worker {who.rank} is told step {step} and weight {weight}; it is {shares[who]}",
            )
        require(not told, "merged twice", f"{text}; told are also {told}")
        inbox.waiting.clear()
        inbox.until, inbox.late, inbox.last = None, None, now
        live = self._live.get(id(delta), shard.core._engine.members.ranks)  # type: ignore[union-attr]
        scale = np.float32(min(1.0, len(waiting) / max(1, len(live))))
        mean = mean_of([(each.values, shares[who]) for who, each in waiting.items()], self._policy.merge)
        return None if mean is None else mean * scale

    def _updated(
        self, shard: Shard, index: int, values: Array, gradient: Array | None, clock: int, delta: Any
    ) -> Array | None:
        if gradient is None:
            return values
        [rate, *_] = next(iter(self._inboxes[shard][index].newest.values())).rates
        updated: Array = values - np.float32(rate) * gradient
        return updated

    def _say_bad(self, shard: Shard, who: WorkerProcess, peer: int, good: Contribution, frames: Any) -> None:
        """Checks that a shard refuses a bad contribution by name, and that nothing changes."""
        core, before = shard.core, self._inboxes[shard][good.tables[0]].newest.get(who)
        said, changes = bad_contribution(self._chance, good, frames, before, self._policy.h)
        state = contributed_to(core)
        assert core.plan is not None
        again = Join(rank=who.rank, plan=core.plan)
        calls: list[tuple[str, Callable[[], Any]]] = [
            (said, lambda: core._contribute(peer, msgspec.structs.replace(good, **changes), frames)),
            ("is taken", lambda: core._join(-1, again)),
        ]
        for text, call in calls:
            try:
                call()
            except ProtocolError as error:
                require(text in str(error), "refusal", f"{error}; it must say {text!r}")
            else:
                raise Violation("refusal", f"{changes}: taken, and must be refused: {text}")
        require(contributed_to(core) == state, "refusal", f"{changes}: refused, and the shard has changed")

    # ---- learners

    def began(self, who: WorkerProcess) -> None:
        """θ whole, an empty residual, and nothing contributed."""
        super().began(who)
        learner = who.worker
        assert isinstance(learner, Learner)
        begin, newest = learner.iteration, max(max(each.versions) for each in learner.conversations)
        self._begin[who] = begin + self._policy.h if newest > 0 else begin
        self._books[who] = {}
        for own, tensor in zip(learner.rounds.tensors, learner.model.tensors, strict=True):
            [table] = tensor.tables
            nothing = np.zeros(table.size, np.float32)
            version = learner.conversations[table.shard].versions[table.index]
            book = Book(own, table, version, self._begin[who], nothing, nothing)
            require(torch.equal(own.local, own.shared), "begins", f"{who.host.name}: {own.name} is not whole")
            book.check(who.host.name)
            self._books[who][table.shard, table.index] = book

    def says(self, who: WorkerProcess, shard: int, message: Message, frames: tuple[EncodedTensor, ...]) -> None:
        super().says(who, shard, message, frames)
        if isinstance(message, Contribution):
            for index, frame in zip(message.tables, frames, strict=True):
                soon = message.step < self._begin[who] and not message.ended
                require(not soon, "begins", f"{who.host.name} contributes {message}, from {self._begin[who]} on it may")
                book = self._books[who][shard, index]
                book.sent(message.step, values_of(frame, (book.table.size,)))

    def hears(self, who: WorkerProcess, index: int, message: Message, frames: tuple[EncodedTensor, ...]) -> None:
        super().hears(who, index, message, frames)
        if isinstance(message, Merged):
            step = dict(zip(message.ranks, message.steps, strict=True)).get(who.rank, -1)
            self._merged |= {(who, index, table, message.version): step for table in message.tables}

    def takes_examples(self, who: WorkerProcess) -> None:
        super().takes_examples(who)
        self._stepping.add(who)

    def waits(self, who: WorkerProcess) -> None:
        require(who not in self._stepping, "waits", f"{who.host.name} waits for a message in a step")

    def used(self, who: WorkerProcess) -> None:
        self._resolve(who)
        self._check_copies(who)

    def computed(self, who: WorkerProcess, tensor: WorkerTensor) -> None:
        [table] = tensor.tables
        book, gradient = self._books[who][table.shard, table.index], tensor.parameter.grad
        assert gradient is not None
        book.progress = np.asarray(book.progress + RATE * gradient.numpy().reshape(-1), np.float32)

    def ended_step(self, who: WorkerProcess) -> None:
        self._stepping.discard(who)
        self.used(who)
        for book in self._books[who].values():
            behind = who.worker.iteration - book.contributed_at
            require(behind <= self._policy.h, "contributes", f"{who.host.name}: {book.own.name} {behind} steps ago")

    def _resolve(self, who: WorkerProcess) -> None:
        super()._resolve(who)
        for (shard, index), book in self._books[who].items():
            while book.version < who.worker.conversations[shard].versions[index]:
                book.version += 1
                newest = self._merged.pop((who, shard, index, book.version))
                book.waiting = [each for each in book.waiting if each[0] > newest]
            book.check(who.host.name)

    def synced(self, who: WorkerProcess) -> None:
        """A flush leaves θ, and nothing that the shards have not merged."""
        for book in self._books[who].values():
            book.residual = np.zeros_like(book.residual)
        super().synced(who)
        self._ended.append(who)
        for book in self._books[who].values():
            require(not book.waiting, "flushed", f"{who.host.name}: {book.own.name} waits: {book.waiting}")
            require(torch.equal(book.own.local, book.own.shared), "flushed", f"{who.host.name}: {book.own.name}")
            plain = self._scenario.workers == 1 and who.life == 0 and "codec=fp32" in self._scenario.design
            if plain and "outer_lr=1.0" in self._scenario.design:
                self._check_alone(who, book.own)

    def _check_alone(self, who: WorkerProcess, own: LearnerTensor) -> None:
        """One learner alone trains as without a server."""
        values = np.zeros(own.local.numel(), np.float32)
        for iteration in range(who.worker.iteration):
            values -= np.float32(RATE) * (gradients(0, iteration)[own.name].reshape(-1) + np.float32(0.125) * values)
        require(close(own.local.numpy(), values), "alone", f"{own.name} is {own.local}; by plain training {values}")

    def check_end(self, *, all_trained: bool) -> None:
        """All that a shard took is in a version; and where no learner was away, all end with the same one."""
        inboxes = [inbox for shard in self._shards.values() for inbox in self._inboxes[shard].values()]
        left = [inbox.waiting for inbox in inboxes if inbox.waiting]
        require(not (all_trained and left), "merged once", f"{left} are in no version")
        ends = {tuple(self.final_bits(who).items()) for who in self._ended}
        same = self._scenario.harmless and not any(who.life for who in self._ended)
        require(not same or len(ends) < 2, "flushed", f"learners end with {ends}")
