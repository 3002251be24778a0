"""A worker's side of the conversation as a pure state machine: what to send, and what may be applied when.

Two buffers. The transmit buffer gathers encoded gradients until they are worth a message: a message per tensor
costs more than the tensor (30 calls cost 44 ms a step, one batch 1.3 ms), and one message per step would leave a
slow link idle during the backward pass. The apply buffer keeps what came down until the model wants it.
It owns no socket, thread or clock, and touches no tensor.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from thinwire.errors import ProtocolError
from thinwire.schema import Delta, Join, Leave, Message, Plan, Push, Refused, Values, Welcome

CHUNK_NBYTES = 32 * 1024
"""A push leaves as soon as this much is ready: 3 ms at 100 Mbit/s, and a few chunks a step for small models."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send, with its frames."""

    message: Message
    frames: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """One step of a table: a delta to add, or (`whole`) values to take over; an empty frame changes nothing."""

    version: int
    frame: bytes
    whole: bool


class WorkerCore:
    """One worker's session with one shard.

    Args:
        rank: this worker's number, 0 … workers − 1.
        plan: what it brings to the shard.
        chunk_nbytes: how many bytes of frames make a push leave.
    """

    def __init__(self, rank: int, plan: Plan, *, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        self.rank = rank
        self.plan = plan
        self.step = 0
        self.versions = [-1] * len(plan.tables)
        self.welcome: Welcome | None = None
        self.last_version: int | None = None
        self.newest = 0
        self._chunk_nbytes = chunk_nbytes
        self._transmit: list[tuple[int, bytes]] = []
        self._transmit_nbytes = 0
        self._pushed: set[int] = set()
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

    def push(self, table: int, frame: bytes, rates: tuple[float, ...], *, last: bool = False) -> Outgoing | None:
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
        self._transmit.append((table, frame))
        self._transmit_nbytes += len(frame)
        return self.flush(rates, last=last) if self._transmit_nbytes >= self._chunk_nbytes else None

    def flush(self, rates: tuple[float, ...], *, last: bool = False) -> Outgoing | None:
        """Returns what waits in the transmit buffer as one message; None where nothing waits."""
        if not self._transmit:
            return None
        tables = tuple(table for table, _ in self._transmit)
        frames = tuple(frame for _, frame in self._transmit)
        self._transmit, self._transmit_nbytes = [], 0
        return Outgoing(Push(step=self.step, tables=tables, rates=rates, last=last), frames)

    def unpushed(self) -> list[int]:
        """Tables (not buffers) that have no frame in this step yet."""
        return [index for index, spec in enumerate(self.plan.tables) if not spec.state and index not in self._pushed]

    def advance(self) -> None:
        """Ends the step: from now on the model wants every table one version further."""
        self.step += 1
        self._pushed.clear()

    def leave(self) -> Outgoing:
        """The last message."""
        return Outgoing(Leave())

    # ---- down

    def received(self, message: Message, frames: tuple[bytes, ...]) -> None:
        """Takes one message of the server.

        Raises:
            ProtocolError: the server refused us, or said something it may not say.
        """
        match message:
            case Welcome():
                self.welcome = message
                if self.step == 0:
                    self.step = message.step
            case Values():
                self._check(message.tables, frames)
                if len(message.versions) != len(frames):
                    raise ProtocolError(f"{len(message.versions)} versions and {len(frames)} frames in one message")
                for table, version, frame in zip(message.tables, message.versions, frames, strict=True):
                    self._apply[table].clear()
                    self._apply[table].append(Update(version, frame, True))
            case Delta():
                self._check(message.tables, frames)
                self.newest = max(self.newest, message.version)
                if message.last:
                    self.last_version = message.version
                for table, frame in zip(message.tables, frames, strict=True):
                    whole = self.plan.tables[table].state
                    self._apply[table].append(Update(message.version, frame, whole))
            case Refused():
                raise ProtocolError(f"the server ended the session: {message.reason}")
            case _:
                raise ProtocolError(f"a server does not send {type(message).__name__}")

    def wants(self, table: int) -> bool:
        """Whether the model's copy of a table is behind the current step, so that forward must wait for it."""
        if self.plan.tables[table].state:
            return self.versions[table] < self._state_version()
        return self.versions[table] < self.step

    def take(self, table: int) -> list[Update]:
        """Returns, and forgets, what has come for a table up to the current step, oldest first.

        Raises:
            ProtocolError: a version is missing in between.
        """
        waiting, taken = self._apply[table], []
        while waiting and (waiting[0].version <= self.step or self.versions[table] < 0):
            update = waiting.popleft()
            if not update.whole and update.version != self.versions[table] + 1:
                raise ProtocolError(
                    f"{self.plan.tables[table].name!r}: version {update.version} came after {self.versions[table]}"
                )
            self.versions[table] = update.version
            taken.append(update)
        return taken

    def _state_version(self) -> int:
        """Version that buffers have in the current step: they travel at steps 0, k, 2k, …"""
        interval = self.plan.state_interval
        return (self.step - 1) // interval * interval + 1 if self.step else 0

    def _check(self, tables: tuple[int, ...], frames: tuple[bytes, ...]) -> None:
        if len(tables) != len(frames):
            raise ProtocolError(f"{len(tables)} tables and {len(frames)} frames in one message")
        if any(not 0 <= table < len(self._apply) for table in tables):
            raise ProtocolError(f"tables {tables}; there are {len(self._apply)}")
