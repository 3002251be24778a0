"""The parameter server as a pure state machine: (peer, message, frames) in, effects out.

It owns no socket, thread or clock. Consistency is bulk-synchronous: a table's update happens when every worker's
gradient for it is in, table by table, so an early layer's update never waits for a late one's gradient. The
model delta of an update is encoded once and the same bytes go to every worker.

A peer that breaks the conversation is refused with the reason and closed; since no step can then complete, the
others are told as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.errors import ConfigError, FrameError, NonFiniteError, ProtocolError
from thinwire.schema import (
    PROTOCOL,
    Delta,
    Join,
    Leave,
    Message,
    Plan,
    Push,
    Refused,
    Values,
    Welcome,
)
from thinwire.server.agreement import check_plan, difference, usable_codecs
from thinwire.server.table import Table
from thinwire.server.updater import Updater
from thinwire.telemetry import Counters

MAX_REASON = 2000
"""Characters. A reason may quote what a peer sent, and the answer to a large message must not be larger still."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send one message to some peers."""

    peers: tuple[int, ...]
    message: Message
    frames: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Close:
    """End a peer's session, after a last word."""

    peer: int
    message: Message | None = None


Effect = Send | Close


class ServerCore:
    """One shard.

    Args:
        rejoin: whether the shard waits for a worker that went away (it comes back with `Join.have`), or
            ends the training at once.
    """

    def __init__(self, *, rejoin: bool = False) -> None:
        self.counters = Counters()
        self.plan: Plan | None = None
        self.tables: list[Table] = []
        self.finished = False
        self._rejoin = rejoin
        self._updater: Updater | None = None
        self._ranks: dict[int, int] = {}
        self._came_back: set[int] = set()
        self._left: set[int] = set()
        self._initialised = False
        self._failed: str | None = None
        self._last_step: int | None = None
        self._rates: tuple[float, ...] = ()

    # ---- events

    def received(self, peer: int, message: Message, frames: tuple[bytes, ...] = ()) -> list[Effect]:
        """Takes one message of a peer and returns what to do."""
        if self._failed is not None:
            return [Close(peer, _refused(self._failed))]
        try:
            return self._dispatch(peer, message, frames)
        except (ProtocolError, ConfigError) as error:
            rank = self._ranks.get(peer)
            if rank is None:
                return [Close(peer, _refused(str(error)))]
            return self._fail(f"worker {rank}: {error}")
        except FrameError as error:  # a gradient may have waited for its turn: the text says whose it is
            return self._fail(str(error))
        except NonFiniteError as error:
            return self._fail(f"the training has diverged: {error}. Use a smaller learning rate or sparsity")

    def closed(self, peer: int, error: str | None) -> list[Effect]:
        """A session is over. In the middle of training that ends it for all, unless the shard waits for rejoins."""
        rank = self._ranks.pop(peer, None)
        if rank is None or self._failed is not None:
            return []
        if self._rejoin:
            self._came_back.add(rank)
            return []
        return self._fail(f"worker {rank} went away at step {self.step}: {error or 'it closed its session'}")

    # ---- the conversation

    def _dispatch(self, peer: int, message: Message, frames: tuple[bytes, ...]) -> list[Effect]:
        if isinstance(message, Join):
            return self._join(peer, message)
        if peer not in self._ranks:
            raise ProtocolError(f"{type(message).__name__} came before Join")
        match message:
            case Push():
                return self._push(peer, message, frames)
            case Values():
                return self._values(peer, message, frames)
            case Leave():
                return self._leave(peer)
            case _:
                raise ProtocolError(f"a worker does not send {type(message).__name__}")

    def _join(self, peer: int, join: Join) -> list[Effect]:
        if join.protocol != PROTOCOL:
            raise ProtocolError(f"the worker speaks protocol {join.protocol}, this server {PROTOCOL}")
        if peer in self._ranks:
            raise ProtocolError("a second Join in one session")
        if self.plan is not None and (reason := difference(self.plan, join.plan)):
            raise ProtocolError(reason)
        if not 0 <= join.rank < join.plan.workers:
            raise ProtocolError(f"rank {join.rank}; this training has ranks 0 … {join.plan.workers - 1}")
        if self.plan is None:
            self._create(join.plan)
        if join.rank in self._ranks.values():
            raise ProtocolError(f"rank {join.rank} is taken: every worker needs a rank of its own")
        if join.rank in self._left:
            raise ProtocolError(f"worker {join.rank} has left this training, and it does not begin again")
        self._ranks[peer] = join.rank
        ask = join.rank == 0 and not self._initialised
        effects: list[Effect] = [Send((peer,), Welcome(send_values=ask, step=self.step))]
        if self._initialised:
            effects += self._catch_up(peer, join.have)
        return effects

    def _create(self, plan: Plan) -> None:
        check_plan(plan)
        codecs = usable_codecs(plan)
        try:
            tables = [Table(spec, codecs[spec.up], codecs[spec.down], plan.workers) for spec in plan.tables]
        except (MemoryError, RuntimeError) as error:  # NumPy's and torch's ways to say so
            raise ProtocolError(f"the tables do not fit the server's memory: {error}") from error
        values = [None if table.spec.state else table.values for table in tables]
        self._updater = Updater(plan, values)
        self.plan, self.tables = plan, tables

    def _catch_up(self, peer: int, have: tuple[int, ...]) -> list[Effect]:
        """What leads a worker from the versions it has to ours: deltas where the log has them, else whole tables."""
        versions = have if len(have) == len(self.tables) else (-1,) * len(self.tables)
        effects: list[Effect] = []
        whole = []
        for index, (table, version) in enumerate(zip(self.tables, versions, strict=True)):
            missing = table.since(version) if version >= 0 else None
            if missing is None:
                whole.append(index)
                continue
            first = table.version - len(missing) + 1
            for offset, frame in enumerate(missing):
                effects.append(Send((peer,), Delta(version=first + offset, tables=(index,)), (frame,)))
        if whole:
            message = Values(tables=tuple(whole), versions=tuple(self.tables[index].version for index in whole))
            effects.append(Send((peer,), message, tuple(self.tables[index].snapshot() for index in whole)))
        return effects

    def _values(self, peer: int, message: Values, frames: tuple[bytes, ...]) -> list[Effect]:
        if self._ranks[peer] != 0 or self._initialised:
            raise ProtocolError("only worker 0 sends initial values, and only once")
        if message.tables != tuple(range(len(self.tables))) or len(frames) != len(self.tables):
            raise ProtocolError(f"initial values came for {len(frames)} of {len(self.tables)} tables")
        for table, frame in zip(self.tables, frames, strict=True):
            table.assign(frame, 0)
        self._initialised = True
        others = tuple(other for other in self._ranks if other != peer)
        down = Values(tables=message.tables, versions=(0,) * len(frames))
        return [Send(others, down, frames)] if others else []

    def _push(self, peer: int, push: Push, frames: tuple[bytes, ...]) -> list[Effect]:
        if not self._initialised:
            raise ProtocolError("a gradient came before the initial values")
        if len(push.tables) != len(frames):
            raise ProtocolError(f"{len(push.tables)} tables and {len(frames)} frames in one push")
        rank = self._ranks[peer]
        assert self.plan is not None
        if rank == 0:
            if len(push.rates) != len(self.plan.groups):
                raise ProtocolError(f"{len(push.rates)} learning rates came for {len(self.plan.groups)} groups")
            # Every table's update waits for rank 0, so its word on the rate and on the end is always in by then.
            self._rates = push.rates
            if push.last:
                self._last_step = push.step
        ready: list[int] = []
        relayed: list[tuple[int, bytes]] = []
        for index, frame in zip(push.tables, frames, strict=True):
            table = self._table(index)
            if self._seen(rank, table, push.step):
                continue
            if table.spec.state:
                relayed.append((index, self._relay(rank, table, push.step, frame)))
                continue
            table.add(rank, frame)
            self.counters.add("payload_frames_push", 1)
            if table.incoming.complete:
                ready.append(index)
            elif reason := self._hopeless(table):
                return self._fail(reason)
        return self._update(ready, push, relayed)

    def _seen(self, rank: int, table: Table, step: int) -> bool:
        """Whether this gradient was already taken: a worker that came back repeats its step."""
        if rank in self._came_back and (step < table.version or table.incoming.has(rank)):
            return True
        if step != table.version and not table.spec.state:
            raise ProtocolError(
                f"a gradient of step {step} came for {table.spec.name!r}, which is at step {table.version}"
            )
        if table.incoming.has(rank):
            raise ProtocolError(f"{table.spec.name!r} got two gradients for step {step}")
        return False

    def _relay(self, rank: int, table: Table, step: int, frame: bytes) -> bytes:
        if rank != 0:
            raise ProtocolError(f"buffer {table.spec.name!r} comes from worker 0 alone")
        newest = max(other.version for other in self.tables if not other.spec.state)
        if not table.version <= step <= newest:
            raise ProtocolError(f"buffer {table.spec.name!r} of step {step} came between {table.version} and {newest}")
        table.assign(frame, step + 1)
        return frame

    def _update(self, ready: list[int], push: Push, relayed: list[tuple[int, bytes]]) -> list[Effect]:
        """One optimizer step over the tables whose gradients are all in; one message with their deltas."""
        assert self.plan is not None and self._updater is not None
        sent = list(relayed)
        if ready:
            tables = [self.tables[index] for index in ready]
            grads = [table.incoming.take(self.plan.reduce) for table in tables]
            changed = [(table, grad) for table, grad in zip(tables, grads, strict=True) if grad is not None]
            for table, _ in changed:
                table.before_update()
            self._updater.set_rates(self._rates)
            self._updater.step([t.values for t, _ in changed], [torch.from_numpy(g) for _, g in changed])
            sent += [
                (index, table.publish(changed=grad is not None))
                for index, table, grad in zip(ready, tables, grads, strict=True)
            ]
        if not sent:
            return []
        indices = tuple(index for index, _ in sent)
        delta = Delta(version=push.step + 1, tables=indices, last=push.step == self._last_step)
        return [Send(tuple(self._ranks), delta, tuple(frame for _, frame in sent))]

    def _leave(self, peer: int) -> list[Effect]:
        assert self.plan is not None
        self._left.add(self._ranks.pop(peer))
        self.finished = len(self._left) == self.plan.workers
        if not (self._initialised or self.finished):
            return [Close(peer), *self._fail("a worker left before the training had begun")]
        for table in self.tables:
            if table.incoming.started and (reason := self._hopeless(table)):
                return [Close(peer), *self._fail(reason)]
        return [Close(peer)]

    def _hopeless(self, table: Table) -> str | None:
        """A step that a worker which has left took no part in is never complete: better said than waited for."""
        for rank in self._left:
            if not table.incoming.has(rank):
                return (
                    f"worker {rank} has left before step {table.version}, with which the others go on; "
                    "all workers must take the same number of steps"
                )
        return None

    # ---- helpers

    def _table(self, index: int) -> Table:
        if not 0 <= index < len(self.tables):
            raise ProtocolError(f"table {index}; there are {len(self.tables)}")
        return self.tables[index]

    def _fail(self, reason: str) -> list[Effect]:
        self._failed = reason
        return [Close(peer, _refused(reason)) for peer in self._ranks]

    @property
    def step(self) -> int:
        """Updates that every parameter has had. Buffers, which travel more rarely, do not count."""
        return min((table.version for table in self.tables if not table.spec.state), default=0)

    @property
    def failed(self) -> str | None:
        """Why the training ended early, or None."""
        return self._failed


def _refused(reason: str) -> Refused:
    return Refused(reason=reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} …")
