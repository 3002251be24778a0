"""A worker's conversation with one shard: which messages go out, and which updates may be applied when.

Two buffers: the transmit buffer collects encoded gradients for one message, the apply buffer keeps
updates until the model needs them. The clock is the worker's and comes as an argument; no tensor is touched here.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from thinwire.errors import ProtocolError, ServerStoppedError, SessionLostError
from thinwire.packets import EncodedTensor, portions
from thinwire.policies.consistency import Consistency, consistency
from thinwire.policies.sampling import Memberships, extended
from thinwire.schema import (
    Ahead,
    Contribution,
    Delta,
    Join,
    Leave,
    Members,
    Merged,
    Message,
    Offer,
    Plan,
    Refused,
    Resume,
    Scalars,
    Values,
    Welcome,
)
from thinwire.version import VERSION
from thinwire.worker.apply_buffer import ApplyBuffer, Update
from thinwire.worker.effects import Procedure, Receive, Send
from thinwire.worker.transmit_buffer import CHUNK_NBYTES, TransmitBuffer


def refusal(message: Refused) -> ProtocolError:
    """Returns the error that a server's last message is to its worker."""
    if message.stopped:
        return ServerStoppedError(f"the server was stopped: {message.reason}")
    kind = SessionLostError if message.lost else ProtocolError
    return kind(f"the server ended the session: {message.reason}")


class Conversation:
    """One worker's conversation with one shard.

    Args:
        shard: the shard's index.
        plan: what the worker brings to the shard.
        policy: of consistency; by default the plan's.
        rank: the worker's number, 0 … workers − 1.
        chunk_nbytes: how many bytes of frames make a push worth sending.

    Attributes:
        transmit: what leaves with the next push.
        updates: what has come and is not applied yet.
        last_version: with which the training ends, once the shard has said so.
        memberships: who divides the data from which clock on.
        gone: the workers that went, though another may have taken the rank since.
        merges: of learners that never wait: what came of merges, to be told and taken from here.
        over: the tables whose last version has come, as all learners have ended.
        joined: whether this worker has asked to take part.
        offer: the shard's newest word on from where this worker can continue; None before.
        has_parameters: whether the shard holds any; else it relays buffers alone.
        notices: what the shard said of workers that came or went, to be told and taken from here.
    """

    def __init__(
        self,
        shard: int,
        plan: Plan,
        policy: Consistency | None = None,
        *,
        rank: int,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        self.shard, self.plan, self.rank = shard, plan, rank
        self.last_version: int | None = None
        self.notices: list[Members] = []
        self.offer: Offer | None = None
        self.merges: list[Merged] = []
        self.over: set[int] = set()
        self.memberships: Memberships = ((0, tuple(range(plan.workers))),)
        self.gone: set[int] = set()
        self.joined = self._changed = self._resumed = False
        self._welcome: Welcome | None = None
        self._policy = policy or consistency(plan.consistency)
        self._terms = self._policy.terms(plan.workers)
        self._newest, self.has_parameters = 0, not all(spec.state for spec in plan.tables)
        self._maxima: dict[int, tuple[float, ...]] = {}
        self._ahead: dict[bool, dict[int, EncodedTensor]] = {True: {}, False: {}}  # by anchor, of values to come
        self.transmit = TransmitBuffer(plan, chunk_nbytes)
        self.updates = ApplyBuffer(plan, rank, immediate=not self._terms.has_common_clock)

    @property
    def versions(self) -> list[int]:
        """Versions of the worker's copy, per table; −1 before the initial values."""
        return self.updates.versions

    @versions.setter
    def versions(self, versions: list[int]) -> None:
        self.updates.versions = versions

    # ---- up

    def join(self, steps: tuple[int, ...] = ()) -> Procedure[None]:
        """Joins, with the steps of which this worker holds states; `offer` is the answer."""
        self.joined = True
        yield Send(self.shard, Join(rank=self.rank, plan=self.plan, steps=steps, version=VERSION))

    def offered(self) -> Procedure[None]:
        """Waits for the first offer."""
        while self.offer is None:
            yield Receive(self.shard, "the other workers, to continue from one step")

    def resume(self, step: int) -> Procedure[None]:
        """Says from which step this worker continues; `welcomed` waits for the answer."""
        self._resumed = True
        have = tuple(self.versions) if min(self.versions, default=-1) >= 0 else ()
        yield Send(self.shard, Resume(step=step, have=have))

    def welcomed(self) -> Procedure[Welcome]:
        """Waits until this worker is admitted.

        Raises:
            SessionLostError: the others continue from another step: all join again.
        """
        while self._welcome is None:
            yield Receive(self.shard, "the other workers, to continue from one step")
        return self._welcome

    def resume_at(self, clock: int) -> None:
        """Every table has answered all of this worker's exchanges so far, or never will."""
        self.updates.answered = [clock] * len(self.plan.tables)

    def send_values(self, frames: tuple[bytes, ...]) -> Procedure[None]:
        """Sends the initial values of every table, uncompressed, in the plan's order."""
        self.versions = [0] * len(self.plan.tables)
        for part in portions(frames):
            tables = tuple(range(part.start, part.stop))
            yield Send(self.shard, Values(tables=tables, versions=(0,) * len(tables)), frames[part])

    def push(self, clock: int, table: int, frame: EncodedTensor) -> bool:
        """Takes this step's frame of a table; returns whether enough is ready for a message.

        Raises:
            ProtocolError: the table was already pushed in this step.
        """
        ready = self.transmit.add(clock, table, frame)
        if frame:
            self.updates.pushed(table, clock)
        return ready

    def flush(self, clock: int, rates: tuple[float, ...], *, last: bool = False, digest: str = "") -> Procedure[None]:
        """Sends the transmit buffer as one message, unless it is empty. Args as for `TransmitBuffer.take`."""
        if (taken := self.transmit.take(clock, rates, last=last, digest=digest)) is not None:
            yield Send(self.shard, *taken)

    def contribute(self, message: Contribution, frames: Sequence[EncodedTensor]) -> Procedure[None]:
        """Sends a contribution, in one or several messages."""
        for part in portions(frames, CHUNK_NBYTES):
            some = {"bases": message.bases[part], "tables": message.tables[part]}
            yield Send(self.shard, msgspec.structs.replace(message, **some), tuple(frames[part]))

    def share_maxima(self, clock: int, values: tuple[float, ...]) -> Procedure[tuple[float, ...]]:
        """Sends one number per table; returns the largest of all workers'."""
        yield Send(self.shard, Scalars(step=clock, values=values))
        while clock not in self._maxima:
            yield Receive(self.shard, f"the shared scales of step {clock}")
        return self._maxima.pop(clock)

    def leave(self, *, returning: bool = False, failure: str = "") -> Procedure[None]:
        """Sends the last message.

        Args:
            returning: another shard was lost, and this worker joins again.
            failure: why this worker cannot continue, if it cannot.
        """
        yield Send(self.shard, Leave(returning=returning, failure=failure))

    # ---- down

    def received(self, message: Message, frames: tuple[EncodedTensor, ...]) -> None:
        """Takes one message of the shard.

        Raises:
            ProtocolError: the shard refused us, or sent something it may not send.
        """
        match message:
            case Welcome():
                self._welcome = message
                if message.final >= 0:
                    self.last_version = message.final
                self.memberships = message.memberships or self.memberships
            case Values():
                self.updates.check(message.tables, frames)
                if len(message.versions) != len(frames):
                    raise ProtocolError(f"{len(message.versions)} versions and {len(frames)} frames in one message")
                for table, version, frame in zip(message.tables, message.versions, frames, strict=True):
                    self._newest = max(self._newest, version)
                    ahead = [own.pop(table, b"") for own in (self._ahead[True], self._ahead[False])]
                    told = tuple(ahead) if all(ahead) else ()
                    self.updates.replace(table, Update(version, frame, True, ahead=told))
            case Ahead():
                self.updates.check(message.tables, frames)
                self._ahead[message.anchor].update(zip(message.tables, frames, strict=True))
            case Delta():
                self.updates.check(message.tables, frames)
                # Statistics are relayed when they come, before anybody knows whether the exchange is the last.
                if not self.has_parameters or not all(self.plan.tables[table].state for table in message.tables):
                    self._newest = max(self._newest, message.version)
                if message.last and self.last_version is None:
                    self.last_version = message.version
                rates, ranks, options, base = message.rates, message.ranks, message.options, message.base
                for table, frame in zip(message.tables, frames, strict=True):
                    whole = self.plan.tables[table].state or self.plan.downlink == "weights"
                    update = Update(message.version, frame, whole, False, rates, ranks, options, base)
                    self.updates.add(table, update)
            case Merged():
                self.updates.check(message.tables, frames)
                if not len(message.ranks) == len(message.steps) == len(message.weights):
                    raise ProtocolError(f"{len(message.ranks)} ranks and {len(message.steps)} steps in one merge")
                self.merges.append(message)
                if len(part := message.momentum) not in (0, 2) or not all(0 <= each <= 1e6 for each in part):
                    raise ProtocolError(f"a momentum of {part} in one merge")
                merged = dict(zip(message.ranks, message.steps, strict=True)).get(self.rank, -1)
                for table, frame in zip(message.tables, frames, strict=True):
                    self.updates.add(table, Update(message.version, frame, False, merged=merged, momentum=part))
                self.over = self.over | {*message.tables} if message.ended else self.over - {*message.tables}
            case Scalars():
                self._maxima[message.step] = message.values
            case Members():
                self.notices.append(message)
                if message.since >= 0:
                    self.gone.update(set(self.memberships[-1][1]) - set(message.ranks))
                    self.memberships = extended(self.memberships, message.since, message.ranks)
                    self._changed = True
            case Offer():
                if self._resumed:
                    raise SessionLostError("the workers continue from another step than was agreed on")
                self.offer, self._changed = message, message.begin >= 0
            case Refused():
                raise refusal(message)
            case _:
                raise ProtocolError(f"a server does not send {type(message).__name__}")

    def is_stale(self, table: int, clock: int, *, strict: bool = False) -> bool:
        """Whether the copy of a table lacks more than the policy allows, so that the forward pass must wait.

        Args:
            table: its index.
            clock: the worker's.
            strict: whether it lacks anything at all that this worker's exchanges led to.
        """
        if self.plan.tables[table].state:
            if not clock or not self._terms.lockstep:  # where workers may run apart, none waits for statistics
                return self.versions[table] < 0
            interval = self.plan.state_interval  # the lowest rank sends them at steps 0, k, 2k, …
            due = (clock - 1) // interval * interval
            return self.versions[table] <= (due if self._will_come(due) else -1)
        if not self._terms.has_common_clock:
            return self.versions[table] < 0 or self.updates.answered[table] < clock
        return self.versions[table] < (clock if strict else self._policy.needs(clock))

    def _will_come(self, clock: int) -> bool:
        """Whether all agree on the sender of statistics at a clock: one that died may have sent gradients alone.

        Where it was replaced at once, and all were to wait for it, the shard stands in for it. One without parameters
        does not know where the others are.
        """
        return self.memberships[-1][0] <= clock if self.has_parameters else not self._changed

    def sends_buffers(self, clock: int) -> bool:
        """Whether this worker sends the statistics of a clock to all: worker 0's, or those of the lowest rank."""
        elastic = self._terms.partial_quorum or (self._welcome is not None and self._welcome.elastic)
        speaker = self.memberships[-1][1][0] if elastic else 0
        return self.rank == speaker and clock % self.plan.state_interval == 0

    def pull(self, table: int, clock: int, *, strict: bool = False) -> Procedure[list[Update]]:
        """Waits until a table is not stale; returns the updates to apply, oldest first. Args as for `is_stale`.

        Raises:
            ProtocolError: a version is missing in between.
        """
        [updates] = yield from self.pull_all([table], [clock], strict=strict)
        return updates

    def pull_all(
        self, tables: Sequence[int], clocks: Sequence[int], *, strict: bool = False
    ) -> Procedure[list[list[Update]]]:
        """As `pull`, of several tables: waits for one after the other."""
        take, found = self.updates.take, []
        for table, clock in zip(tables, clocks, strict=True):
            updates = take(table, clock)
            while self.is_stale(table, clock, strict=strict):
                yield Receive(self.shard, f"{self.plan.tables[table].name!r} of step {clock}")
                updates += take(table, clock)
            found.append(updates)
        return found

    def ended(self, clock: int) -> Procedure[bool]:
        """Whether the last exchange ended the training (where clocks are everyone's own, any exchange).

        Waits for the shard's first message of that exchange.
        """
        while self._newest < clock:
            yield Receive(self.shard, f"step {clock}")
        return self.is_over(clock)

    def is_over(self, clock: int) -> bool:
        """Whether the training ended with the last exchange, as far as the shard has said."""
        return self.last_version is not None and (not self._terms.has_common_clock or clock >= self.last_version)
