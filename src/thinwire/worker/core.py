"""A worker's side of the conversation as a pure state machine: what to send, and what may be applied when.

Two buffers. The transmit buffer gathers encoded gradients until they are worth a message: a message per tensor
costs more than the tensor (30 calls cost 44 ms a step, one batch 1.3 ms), and one message per step would leave a
slow link idle during the backward pass. The apply buffer keeps what came down until the model wants it.
It owns no socket, thread or clock, and touches no tensor.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from thinwire.errors import ProtocolError
from thinwire.packets import EncodedTensor
from thinwire.policies.consistency import Consistency, consistency
from thinwire.schema import Changes, Delta, Join, Leave, Message, Plan, Push, Refused, Scalars, Values, Welcome

CHUNK_NBYTES = 32 * 1024
"""A push leaves as soon as this much is ready: 3 ms at 100 Mbit/s, and a few chunks a step for small models."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send, with its frames."""

    message: Message
    frames: tuple[EncodedTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """One step of a table.

    Args:
        version: that the table has afterwards.
        frame: what leads there, a frame or a tensor of a batch; empty changes nothing.
        whole: the frame holds values to take over, not something to add or to step by.
        missed: this worker pushed a gradient that came too late for it.
        rates: of this step, where the workers run the optimizer.
        options: of this step, likewise, where they differ from the plan's.
        ranks: whose gradients are in it, where some may be missing.
    """

    version: int
    frame: EncodedTensor
    whole: bool
    missed: bool = False
    rates: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    options: Changes = ()


class WorkerCore:
    """One worker's session with one shard.

    Args:
        rank: this worker's number, 0 … workers − 1.
        plan: what it brings to the shard.
        chunk_nbytes: how many bytes of frames make a push leave.
        policy: of consistency; by default the plan's.

    Attributes:
        step: this worker's clock: how many exchanges it has taken part in.
        versions: of the model's copy, per table; −1 before the initial values.
    """

    def __init__(
        self, rank: int, plan: Plan, *, chunk_nbytes: int = CHUNK_NBYTES, policy: Consistency | None = None
    ) -> None:
        self.rank = rank
        self.plan = plan
        self.step = 0
        self.versions = [-1] * len(plan.tables)
        self.welcome: Welcome | None = None
        self.last_version: int | None = None
        self.newest = 0
        self.maxima: dict[int, tuple[float, ...]] = {}
        self.policy = policy or consistency(plan.consistency)
        self._lockstep = self.policy.quorum(plan.workers) == plan.workers and self.policy.lead() == 0
        self._chunk_nbytes = chunk_nbytes
        self._transmit: list[tuple[int, EncodedTensor]] = []
        self._transmit_nbytes = 0
        self._options: Changes = ()
        self._pushed: set[int] = set()
        self._pushed_at = [-1] * len(plan.tables)
        self._answered = [0] * len(plan.tables)
        self._bases: dict[tuple[int, int], int] = {}
        self._apply: list[deque[Update]] = [deque() for _ in plan.tables]

    # ---- up

    def join(self) -> Outgoing:
        """The first message; with the versions it already has, where this worker comes back."""
        have = tuple(self.versions) if min(self.versions, default=-1) >= 0 else ()
        return Outgoing(Join(rank=self.rank, plan=self.plan, have=have))

    def initial(self, frames: tuple[bytes, ...]) -> Outgoing:
        """The initial values of every table, uncompressed, in the plan's order."""
        self.versions = [0] * len(self.plan.tables)
        return Outgoing(Values(tables=tuple(range(len(frames))), versions=(0,) * len(frames)), frames)

    def push(
        self, table: int, frame: EncodedTensor, rates: tuple[float, ...], *, last: bool = False
    ) -> Outgoing | None:
        """Takes this step's frame of a table; returns a message once enough is ready.

        Raises:
            ProtocolError: the table was already pushed in this step.
        """
        if table in self._pushed:
            raise ProtocolError(
                f"{self.plan.tables[table].name!r} was pushed twice in step {self.step}: several backward passes "
                "before one step() need `with opt.no_sync():` around all but the last"
            )
        self._pushed.add(table)
        if frame:
            self._pushed_at[table] = self.step
        self._transmit.append((table, frame))
        self._transmit_nbytes += len(frame)
        return self.flush(rates, last=last) if self._transmit_nbytes >= self._chunk_nbytes else None

    def say(self, options: Changes) -> None:
        """These options changed: the next push says so, before its gradients count."""
        self._options = options

    def flush(self, rates: tuple[float, ...], *, last: bool = False, digest: str = "") -> Outgoing | None:
        """Returns what waits in the transmit buffer as one message; None where nothing waits."""
        if not self._transmit and not digest:
            return None
        tables = tuple(table for table, _ in self._transmit)
        frames = tuple(frame for _, frame in self._transmit)
        self._transmit, self._transmit_nbytes = [], 0
        options, self._options = self._options, ()
        push = Push(step=self.step, tables=tables, rates=rates, last=last, digest=digest, options=options)
        return Outgoing(push, frames)

    def unpushed(self) -> list[int]:
        """Tables (not buffers) that have no frame in this step yet."""
        return [index for index, spec in enumerate(self.plan.tables) if not spec.state and index not in self._pushed]

    def scalars(self, values: tuple[float, ...]) -> Outgoing:
        """One number per table, of which everybody gets the largest."""
        return Outgoing(Scalars(step=self.step, values=values))

    @property
    def ended(self) -> bool:
        """Whether worker 0 ended the training with the last exchange; where clocks are everyone's own, with any."""
        return self.last_version is not None and (self.policy.immediate or self.step >= self.last_version)

    @property
    def reached(self) -> int | None:
        """The newest version of which every parameter's update is here, applied or not; None without parameters."""
        versions = [
            self._apply[table][-1].version if self._apply[table] else self.versions[table]
            for table, spec in enumerate(self.plan.tables)
            if not spec.state
        ]
        return min(versions, default=None)

    def advance(self, newest: int = 0) -> None:
        """Ends the exchange: from now on the model wants every table as far as the policy says.

        Args:
            newest: where updates are made without this worker, the version with which it goes on: the newest that
                all tables of all shards have reached. One clock for all shards: were each to go on with its own,
                workers could end up waiting for each other.
        """
        self.step = max(self.step + 1, newest)
        self._pushed.clear()

    def leave(self) -> Outgoing:
        """The last message."""
        return Outgoing(Leave())

    # ---- down

    def received(self, message: Message, frames: tuple[EncodedTensor, ...]) -> None:
        """Takes one message of the server.

        Raises:
            ProtocolError: the server refused us, or said something it may not say.
        """
        match message:
            case Welcome():
                self.welcome = message
                if self.step == 0 and not self.policy.immediate:  # there, everybody counts their own exchanges
                    self.step = message.step
                if message.final >= 0:
                    self.last_version = message.final
            case Values():
                self._check(message.tables, frames)
                if len(message.versions) != len(frames):
                    raise ProtocolError(f"{len(message.versions)} versions and {len(frames)} frames in one message")
                for table, version, frame in zip(message.tables, message.versions, frames, strict=True):
                    self.newest = max(self.newest, version)
                    self._apply[table].clear()
                    self._apply[table].append(Update(version, frame, True))
            case Delta():
                self._check(message.tables, frames)
                self.newest = max(self.newest, message.version)
                if message.last and self.last_version is None:
                    self.last_version = message.version
                for table, frame in zip(message.tables, frames, strict=True):
                    self._apply[table].append(self._update(table, message, frame))
            case Scalars():
                self.maxima[message.step] = message.values
            case Refused():
                raise ProtocolError(f"the server ended the session: {message.reason}")
            case _:
                raise ProtocolError(f"a server does not send {type(message).__name__}")

    def wants(self, table: int, *, fully: bool = False) -> bool:
        """Whether the model's copy of a table is further behind than the policy allows, so that forward must wait.

        With `fully`, whether it lacks anything at all that this worker's exchanges led to.
        """
        if self.plan.tables[table].state:
            # Where workers may run apart, nobody waits for worker 0's statistics.
            return self.versions[table] < (self._state_version() if self._lockstep else 0)
        if self.policy.immediate:
            return self.versions[table] < 0 or self._answered[table] < self.step
        return self.versions[table] < (self.step if fully else self.policy.needs(self.step))

    def take(self, table: int) -> list[Update]:
        """Returns, and forgets, what has come for a table up to the current step, oldest first.

        Raises:
            ProtocolError: a version is missing in between.
        """
        waiting, taken = self._apply[table], []
        while waiting and (waiting[0].version <= self.step or self.policy.immediate or self.versions[table] < 0):
            update = waiting.popleft()
            if not update.whole and self._base(table, update) != self.versions[table]:
                raise ProtocolError(
                    f"{self.plan.tables[table].name!r}: version {update.version} came after {self.versions[table]}"
                )
            self.versions[table] = update.version
            self._answered[table] += not update.whole
            taken.append(replace(update, missed=True) if self._missed(table, update) else update)
        return taken

    def _update(self, table: int, delta: Delta, frame: EncodedTensor) -> Update:
        if delta.base >= 0:
            self._bases[table, delta.version] = delta.base
        whole = self.plan.tables[table].state or (self.plan.downlink == "weights")
        return Update(delta.version, frame, whole, rates=delta.rates, ranks=delta.ranks, options=delta.options)

    def _missed(self, table: int, update: Update) -> bool:
        """Whether our gradient came too late for an update. The update may have come before we pushed."""
        took_part = not update.ranks or self.rank in update.ranks
        return not took_part and self._pushed_at[table] == update.version - 1

    def _base(self, table: int, update: Update) -> int:
        """The version that an update leads from."""
        return self._bases.pop((table, update.version), update.version - 1)

    def _state_version(self) -> int:
        """Version that buffers have in the current step: they travel at steps 0, k, 2k, …"""
        interval = self.plan.state_interval
        return (self.step - 1) // interval * interval + 1 if self.step else 0

    def _check(self, tables: tuple[int, ...], frames: tuple[EncodedTensor, ...]) -> None:
        if len(tables) != len(frames):
            raise ProtocolError(f"{len(tables)} tables and {len(frames)} frames in one message")
        if any(not 0 <= table < len(self._apply) for table in tables):
            raise ProtocolError(f"tables {tables}; there are {len(self._apply)}")
