"""Bugs that are planted one at a time: a simulator that does not find them would not find others either.

Each replaces one method of the real code by one with a mistake that a programmer could make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from unittest import mock

import msgspec

from thinwire.collective.membership import Membership
from thinwire.collective.owned_shard import OwnedShard
from thinwire.errors import ProtocolError, SessionLostError, TransportError
from thinwire.local.decoupled import LearnerTensor
from thinwire.packets import EncodedTensor, parse
from thinwire.policies.compression import PLAIN
from thinwire.runtime.checkpoint import Snapshot
from thinwire.runtime.session import Dial, Reconnection, Repeat, ReplayBuffer, WorkerSession
from thinwire.runtime.session_server import SessionServer
from thinwire.schema import Contribution, Push, Refused, SessionAccepted
from thinwire.server.contributions import Contributions, Learner
from thinwire.server.core import ServerCore
from thinwire.server.effects import Effect
from thinwire.server.merge_engine import MergeEngine
from thinwire.server.rounds import Maxima
from thinwire.server.table import Table
from thinwire.server.update_engine import UpdateEngine
from thinwire.worker import decoupled
from thinwire.worker.conversation import Conversation
from thinwire.worker.effects import Procedure
from thinwire.worker.table import WorkerTable

Wrong: TypeAlias = Callable[..., Any]
Right: TypeAlias = Callable[..., Any]
"""The method without the mistake, which a wrong one is given first."""

BUGS: dict[str, tuple[Any, str, Any]] = {}
"""By name: the attribute's owner, its name, and the wrong one."""
OF_LEARNERS: set[str] = set()
"""Those that seeds of learners find, which never wait for each other."""


def bug(name: str, owner: Any, attribute: str, *, of_learners: bool = False) -> Callable[[Wrong], Wrong]:
    """Enters a method, or what a property gives, under the name of its bug."""
    right = getattr(owner, attribute)
    OF_LEARNERS.update({name} if of_learners else ())

    def enter(wrong: Wrong) -> Wrong:
        def method(self: Any, *given: Any, **options: Any) -> Any:
            return wrong(right, self, *given, **options)

        BUGS[name] = owner, attribute, property(method) if isinstance(right, property) else method
        return wrong

    return enter


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside the block the code has this bug."""
    with mock.patch.object(*BUGS[name]):
        yield


# ---- sessions


def _resume(self: WorkerSession, left: float, sent: Callable[[ReplayBuffer, int], Sequence[bytes]]) -> Reconnection:
    packet = yield Dial(left, self.opening())
    message = None if packet is None else parse(packet)[0]
    if isinstance(message, Refused):
        raise (SessionLostError if message.lost else ProtocolError)(message.reason)
    if not isinstance(message, SessionAccepted):
        raise TransportError("not taken up again")
    yield Repeat(sent(self.buffer, message.received))


@bug("a push applied twice on resend", WorkerSession, "_resume")
def _(right: Right, self: WorkerSession, left: float) -> Reconnection:
    """A worker repeats all that it has kept, whatever the server says it has."""
    return _resume(self, left, lambda buffer, received: buffer.unacknowledged)


@bug("a push lost on resend", WorkerSession, "_resume")
def _(right: Right, self: WorkerSession, left: float) -> Reconnection:
    """A worker does not repeat the message that was being sent when the connection broke."""

    def repeats(buffer: ReplayBuffer, received: int) -> Sequence[bytes]:
        buffer.acknowledge(received)
        return buffer.unacknowledged[:-1]

    return _resume(self, left, repeats)


@bug("messages counted that were dropped", WorkerSession, "_raise_ended")
def _(right: Right, self: WorkerSession, error: TransportError, arrived: Sequence[bytes | None]) -> None:
    """A worker counts the messages that it drops while it reconnects, which the server then does not repeat."""
    self.buffer.received += sum(packet is not None for packet in arrived)


@bug("a replaced connection speaks on", SessionServer, "_replace")
def _(right: Right, self: SessionServer, session: Any, packet: bytes | None = None) -> None:
    """Packets that were under way on a replaced connection are taken as well."""
    peer = session.peer
    right(self, session, packet)
    self._replaced.discard(peer)
    self._of_peer[peer] = session


@bug("replaced connections never forgotten", SessionServer, "closed")
def _(right: Right, self: SessionServer, peer: int, error: str | None) -> None:
    replaced = peer in self._replaced
    right(self, peer, error)
    if replaced:
        self._replaced.add(peer)


# ---- updates


@bug("the residual of a late push kept", WorkerTable, "keep_residual")
def _(right: Right, self: WorkerTable) -> None:
    """A worker whose gradient came too late keeps the residual of its having been sent."""
    right(self)
    self._residual_before = None


@bug("a late push not reported", UpdateEngine, "_update")
def _(right: Right, self: UpdateEngine, *given: Any, **options: Any) -> Any:
    """An update does not say which gradients are in it, so that no worker learns of a late one."""
    outgoing = right(self, *given, **options)
    for each in outgoing:
        object.__setattr__(each, "message", msgspec.structs.replace(each.message, ranks=()))
    return outgoing


@bug("a late push counted in the next update", UpdateEngine, "push")
def _(
    right: Right, self: UpdateEngine, rank: int, push: Push, frames: tuple[EncodedTensor, ...], **options: Any
) -> Any:
    if self.terms.partial_quorum and push.step < self.step:
        push = msgspec.structs.replace(push, step=self.step)
    return right(self, rank, push, frames, **options)


@bug("a dead worker's gradient dropped", UpdateEngine, "drop")
def _(right: Right, self: UpdateEngine, rank: int) -> Any:
    """The gradient of a worker that died after it came is forgotten, and the update is made without it."""
    arrived = self.shard._inbox.get(self.step, {})
    arrived.pop(rank, None)
    if not arrived:
        self.shard._inbox.pop(self.step, None)
    return right(self, rank)


@bug("one update too stale", Conversation, "is_stale")
def _(right: Right, self: Conversation, table: int, clock: int, *, strict: bool = False) -> Any:
    return right(self, table, max(0, clock - (0 if strict else 1)), strict=strict)


# ---- membership


@bug("a stale clock in the welcome", OwnedShard, "first_unbegun_clock")
def _(right: Right, self: OwnedShard) -> int:
    """A worker that joins late is expected at the last clock that has begun, not at the one after it."""
    return max(self._inbox, default=int(self.clocks.max(initial=0)))


@bug("a drop that forgets the scalars", Maxima, "completed")
def _(right: Right, self: Maxima, expected: Any) -> list[Any]:
    """Scales that the others wait for are not sent where the last one missing was a dead worker's."""
    return []


@bug("the dead still waited for", Membership, "drop")
def _(right: Right, self: Membership, rank: int) -> None:
    """A worker that was dropped is still expected."""


@bug("data divided anew too early", Membership, "divide_data")
def _(right: Right, self: Membership, clock: int) -> None:
    """From a clock whose examples workers have taken."""
    right(self, max(0, clock - 2))


@bug("a late worker given the server's values", Table, "snapshot")
def _(right: Right, self: Table, rank: int = 0) -> bytes:
    """The others' copies lag behind those."""
    self.given[rank] = self.version
    return PLAIN.encode(self.downlink.values)


@bug("a stranger ends the training", ServerCore, "broke")
def _(right: Right, self: ServerCore, peer: int, reason: str) -> list[Effect]:
    if peer not in self._peers and self._initialised and self._failed is None:
        return self._fail(reason)
    effects: list[Effect] = right(self, peer, reason)
    return effects


# ---- checkpoints


@bug("a checkpoint written in its place", Snapshot, "write")
def _(right: Right, self: Snapshot, path: Any, disk: Any) -> None:
    """Without a file beside it."""
    with disk.write(path, self.parts()):
        disk.sync(path.parent)


@bug("a checkpoint without the workers' copies", Table, "state_dict")
def _(right: Right, self: Table) -> dict[str, Any]:
    """A checkpoint of a shard has its own values in place of the workers' copies."""
    state: dict[str, Any] = right(self)
    for copy in state["downlink"].get("copies", ()):
        copy["values"] = state["downlink"]["values"].copy()
    return state


# ---- learners that never wait


@bug("progress that counts twice", LearnerTensor, "follow", of_learners=True)
def _(right: Right, self: LearnerTensor, before: Any, merged: Any) -> None:
    """A learner adds a whole version, and does not subtract what it has contributed to it."""
    right(self, before, None)


@bug("a contribution merged twice", Contributions, "_decoded", of_learners=True)
def _(right: Right, self: Contributions, learner: Learner, place: int) -> Any:
    """A shard keeps an older contribution that it has merged together with a newer one."""
    before = learner.sums.get(place)
    kept = None if before is None else before.copy()
    change = right(self, learner, place)
    if kept is not None:
        learner.sums[place] = kept
    return change


@bug("no grace", Contributions, "_window", of_learners=True)
def _(right: Right, self: Contributions, now: float) -> Any:
    """A quorum is merged at once."""
    return 0 * right(self, now)


@bug("a sum of contributions in place of their mean", Contributions, "_average", of_learners=True)
def _(right: Right, self: Contributions, place: int, here: Sequence[tuple[Learner, float]], **options: Any) -> None:
    """Weights are not normalised."""
    right(self, place, [(learner, share * len(here)) for learner, share in here], **options)


@bug("learners that are gone awaited for ever", Contributions, "_state", of_learners=True)
def _(right: Right, self: Contributions, live: Any) -> Any:
    """A shard waits for all learners that have ever contributed."""
    return right(self, {*live, *(learner.rank for learner in self._learners)})


@bug("a version that was never published", MergeEngine, "_check_contribution", of_learners=True)
def _(right: Right, self: MergeEngine, rank: int, message: Contribution, frames: Any) -> Any:
    """A shard does not check the version from which a learner continued."""
    return right(self, rank, msgspec.structs.replace(message, bases=(0,) * len(message.bases)), frames)


@bug("a contribution right after coming back", decoupled.Learner, "start", of_learners=True)
def _(right: Right, self: decoupled.Learner, step: int) -> Procedure[None]:
    """Before h steps were taken."""
    yield from right(self, step)
    self._contributes_from = 0
