"""Bugs that are planted one at a time: a simulator that does not find them would not find others either.

Each replaces one method of the real code by one with a mistake that somebody could make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any
from unittest import mock

import msgspec

from thinwire.errors import ProtocolError, SessionLostError, TransportError
from thinwire.packets import EncodedTensor, parse
from thinwire.policies.compression import PLAIN
from thinwire.runtime.checkpoint import Snapshot
from thinwire.runtime.checkpointing import CheckpointWriter
from thinwire.runtime.session import Await, Dial, Drain, Reconnection, ReplayBuffer, Transmit, WorkerSession
from thinwire.runtime.session_server import SessionServer
from thinwire.schema import Push, Refused, SessionAccepted
from thinwire.server.aggregation import Aggregation
from thinwire.server.core import ServerCore
from thinwire.server.effects import Effect
from thinwire.server.membership import Membership
from thinwire.server.rounds import Maxima
from thinwire.server.stragglers import Stragglers
from thinwire.server.table import Table
from thinwire.server.update_engine import UpdateEngine
from thinwire.worker.conversation import Conversation
from thinwire.worker.table import WorkerTable

Patch = tuple[Any, str, Any]
"""Whose attribute, its name, and the wrong one."""


# ---- sessions


def _repeating(repeats: Callable[[ReplayBuffer, int], Sequence[bytes]]) -> Patch:
    def resume(self: WorkerSession, left: float) -> Reconnection:
        yield Dial(left)
        yield Transmit(self.opening())
        packet = yield Await(left)
        message = None if packet is None else parse(packet)[0]
        if isinstance(message, Refused):
            raise (SessionLostError if message.lost else ProtocolError)(message.reason)
        if not isinstance(message, SessionAccepted):
            raise TransportError("not taken up again")
        for sent in repeats(self.buffer, message.received):
            yield Transmit(sent)

    return WorkerSession, "_resume", resume


def _twice_on_resend() -> Patch:
    """A worker repeats all that it has kept, whatever the server says it has."""
    return _repeating(lambda buffer, received: buffer.unacknowledged)


def _lost_on_resend() -> Patch:
    """A worker does not repeat the message that was being sent when the connection broke."""

    def repeats(buffer: ReplayBuffer, received: int) -> Sequence[bytes]:
        buffer.acknowledge(received)
        return buffer.unacknowledged[:-1]

    return _repeating(repeats)


def _counts_dropped() -> Patch:
    """A worker counts the messages that it drops while it reconnects, which the server then does not repeat."""

    def look(self: WorkerSession, error: TransportError) -> Reconnection:
        with suppress(TransportError):
            while (yield Drain()) is not None:
                self.buffer.received += 1

    return WorkerSession, "_look_for_refusal", look


def _replaced_connection_speaks_on() -> Patch:
    """Packets that were under way on a replaced connection are taken as well."""
    right = SessionServer._replace

    def replace(self: SessionServer, session: Any, packet: bytes | None = None) -> None:
        peer = session.peer
        right(self, session, packet)
        self._replaced.discard(peer)
        self._of_peer[peer] = session

    return SessionServer, "_replace", replace


def _replaced_connections_kept() -> Patch:
    """The numbers of replaced connections are never forgotten."""
    right = SessionServer.closed

    def closed(self: SessionServer, peer: int, error: str | None) -> None:
        replaced = peer in self._replaced
        right(self, peer, error)
        if replaced:
            self._replaced.add(peer)

    return SessionServer, "closed", closed


# ---- updates


def _late_residual_kept() -> Patch:
    """A worker whose gradient came too late keeps the residual of its having been sent."""
    right = WorkerTable.prepare

    def prepare(self: WorkerTable, total: Any) -> Any:
        prepared = right(self, total)
        self._residual_before = None
        return prepared

    return WorkerTable, "prepare", prepare


def _late_not_reported() -> Patch:
    """An update does not say whose gradients are in it, so that nobody learns of a late one."""
    right = UpdateEngine._update

    def update(self: UpdateEngine, *args: Any, **options: Any) -> Any:
        outgoing = right(self, *args, **options)
        for each in outgoing:
            object.__setattr__(each, "message", msgspec.structs.replace(each.message, ranks=()))
        return outgoing

    return UpdateEngine, "_update", update


def _late_counts() -> Patch:
    """A gradient that came too late is added to the current clock."""
    right = UpdateEngine.push

    def push(self: UpdateEngine, rank: int, push: Push, frames: tuple[EncodedTensor, ...], **options: Any) -> Any:
        if self.terms.partial_quorum and push.step < self.step:
            push = msgspec.structs.replace(push, step=self.step)
        return right(self, rank, push, frames, **options)

    return UpdateEngine, "push", push


def _dead_gradient_dropped() -> Patch:
    """The gradient of a worker that died after it came is forgotten, and the update is made without it."""
    right = UpdateEngine.drop

    def drop(self: UpdateEngine, rank: int) -> Any:
        for lane in self.lanes:
            lane._arrived[lane.clock].pop(rank, None)
        return right(self, rank)

    return UpdateEngine, "drop", drop


def _too_stale() -> Patch:
    """A worker goes on one update earlier than its policy allows."""
    right = Conversation.is_stale

    def is_stale(self: Conversation, table: int, clock: int, *, strict: bool = False) -> bool:
        return right(self, table, max(0, clock - (0 if strict else 1)), strict=strict)

    return Conversation, "is_stale", is_stale


# ---- membership


def _stale_welcome() -> Patch:
    """A worker that joins late is expected at the last clock that somebody has begun, not at the one after it."""

    def untouched(self: Aggregation) -> int:
        return max((clock for clock, arrived in self._arrived.items() if arrived), default=self.clock)

    return Aggregation, "untouched", property(untouched)


def _drop_forgets_scalars() -> Patch:
    """Scales that the others wait for are not sent where the last one missing was a dead worker's."""
    return Maxima, "completed", lambda self, expected: []


def _dead_waited_for() -> Patch:
    """A worker that was dropped is still expected."""
    return Membership, "drop", lambda self, rank: None


def _late_given_servers_values() -> Patch:
    """A worker that begins late is given the server's values, which the others' copies lag behind."""

    def snapshot(self: Table, rank: int = 0) -> bytes:
        self.given[rank] = self.version
        return PLAIN.encode(self.downlink.values)

    return Table, "snapshot", snapshot


def _strangers_end_it() -> Patch:
    """What a peer says that never joined ends the training for all."""
    right = ServerCore.broke

    def broke(self: ServerCore, peer: int, reason: str) -> list[Effect]:
        if peer not in self._ranks and self._initialised and self._failed is None:
            return self._fail(reason)
        return right(self, peer, reason)

    return ServerCore, "broke", broke


# ---- stragglers


def _stragglers_waited_for() -> Patch:
    """Nobody is ever late."""

    def overdue(self: Stragglers, step: int, now: float, ranks: tuple[int, ...]) -> bool:
        return False

    return Stragglers, "overdue", overdue


def _stragglers_not_waited_for() -> Patch:
    """The grace is not added to the usual time."""
    return Stragglers, "patience_s", property(lambda self: median(self._times))


# ---- checkpoints


def _written_in_place() -> Patch:
    """A checkpoint is written in its place, without a file beside it."""

    def write(self: Snapshot, path: Any, disk: Any, since: int | None = None) -> None:
        with disk.write(path, self.parts()):
            disk.sync(path.parent)

    return Snapshot, "write", write


def _copies_not_saved() -> Patch:
    """A checkpoint of a shard has its own values in place of the workers' copies."""
    right = Table.state_dict

    def state_dict(self: Table) -> dict[str, Any]:
        state = right(self)
        for copy in state["downlink"].get("copies", ()):
            copy["values"] = state["downlink"]["values"].copy()
        return state

    return Table, "state_dict", state_dict


def _two_kept() -> Patch:
    """Everybody keeps the last two checkpoints, whatever the others have."""
    original = CheckpointWriter.keep_since
    return CheckpointWriter, "keep_since", lambda self, step, own: original(self, None, own)


BUGS: dict[str, Callable[[], Patch]] = {
    "a push applied twice on resend": _twice_on_resend,
    "a push lost on resend": _lost_on_resend,
    "messages counted that were dropped": _counts_dropped,
    "a replaced connection speaks on": _replaced_connection_speaks_on,
    "replaced connections never forgotten": _replaced_connections_kept,
    "the residual of a late push kept": _late_residual_kept,
    "a late push not reported": _late_not_reported,
    "a late push counted in the next update": _late_counts,
    "a dead worker's gradient dropped": _dead_gradient_dropped,
    "one update too stale": _too_stale,
    "a stale clock in the welcome": _stale_welcome,
    "a drop that forgets the scalars": _drop_forgets_scalars,
    "the dead still waited for": _dead_waited_for,
    "a late worker given the server's values": _late_given_servers_values,
    "a stranger ends the training": _strangers_end_it,
    "a straggler waited for": _stragglers_waited_for,
    "a straggler given no grace": _stragglers_not_waited_for,
    "a checkpoint written in its place": _written_in_place,
    "a checkpoint without the workers' copies": _copies_not_saved,
    "a checkpoint removed that another process needs": _two_kept,
}
"""Bugs by name."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside the block the code has this bug."""
    owner, attribute, wrong = BUGS[name]()
    with mock.patch.object(owner, attribute, wrong):
        yield
