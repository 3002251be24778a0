"""The server core behind a transport: packets in, and what the core wants done carried out.

`session_server` stands between the two, so a peer here is a session, which may outlive its connections.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from thinwire.errors import ConfigError, ProtocolError
from thinwire.packets import EncodedTensor, PacketLimits, kind_of, pack, parse
from thinwire.runtime.clock import MOMENT_S, Cancel, Clock, SystemClock, check_seconds
from thinwire.runtime.journal import Journal
from thinwire.runtime.limits import JOIN_TOO_LARGE, MAX_JOIN_NBYTES, Allowance, allowance, check_memory
from thinwire.runtime.session_server import SessionServer
from thinwire.runtime.shard_checkpoints import Checkpointer
from thinwire.schema import Contribution, Join, Leave, Message, Plan
from thinwire.server.core import ServerCore
from thinwire.server.effects import Close, Effect, Send, Tell
from thinwire.transports.base import Sender

_log = logging.getLogger(__name__)


def serving(
    core: ServerCore,
    on_end: Callable[[], None] = lambda: None,
    checkpointer: Checkpointer | None = None,
    *,
    grace_s: float = 0.0,
    clock: Clock | None = None,
    journal: Journal | None = None,
) -> Serving:
    """Returns what one server of a transport needs to serve `core`.

    Args:
        core: the shard.
        on_end: called once, when every worker has left or the training has failed.
        checkpointer: writes the shard's checkpoints.
        grace_s: how long a worker whose connection broke may take to come back, in seconds; 0 ends the training.
        clock: by default the system's.
        journal: is told of every gradient and update.

    Raises:
        ConfigError: `grace_s` is no time that can be waited for.
    """
    check_seconds(grace_s=grace_s)
    return Serving(
        partial(ServerHandler, core, on_end=on_end, checkpointer=checkpointer, journal=journal),
        grace_s,
        clock or SystemClock(),
    )


class Serving:
    """Makes the handler of one transport's server, and may end its training.

    Args:
        make: returns the handler of sessions.
        grace_s, clock: as for `serving`.
    """

    def __init__(self, make: Callable[..., ServerHandler], grace_s: float, clock: Clock) -> None:
        self._make, self._grace_s, self._clock = make, grace_s, clock
        self._handler: ServerHandler | None = None

    def __call__(self, sender: Sender) -> SessionServer:
        """Returns the handler of a server with this sender; a transport calls it."""

        def handler(sessions: Sender) -> ServerHandler:
            self._handler = self._make(sessions, grace_s=self._grace_s, clock=self._clock)
            return self._handler

        return SessionServer(handler, sender, self._grace_s, self._clock)

    def end(self, reason: str) -> None:
        """Ends the training before its end, where workers are here: they hear why. For any thread."""
        if self._handler is not None:
            self._handler.end(reason)


class ServerHandler:
    """Feeds packets to a core and carries out its effects. One packet object goes to all receivers of an effect.

    Args:
        core, on_end, checkpointer, journal, grace_s, clock: as for `serving`.
        sender: of the sessions.
    """

    def __init__(
        self,
        core: ServerCore,
        sender: Sender,
        on_end: Callable[[], None],
        checkpointer: Checkpointer | None = None,
        journal: Journal | None = None,
        *,
        grace_s: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self._core, self._sender, self._checkpointer, self._journal = core, sender, checkpointer, journal
        self._clock, self._grace_s = clock or SystemClock(), grace_s
        self._on_end: Callable[[], None] | None = on_end
        self._plan: Plan | None = None
        self._allowance: Allowance | None = None
        """Of `_plan`: a shard that has not begun may forget one for another."""
        self._joined: dict[int, int] = {}
        """The rank of every session that has joined."""
        self._interrupted: dict[int, Cancel] = {}
        self._awaiting = False
        self._away: frozenset[int] = frozenset()
        core.now = self._clock.now
        self._merges_at: float | None = None
        """When the core is called to merge, where that is planned."""

    def opened(self, peer: int) -> None:
        """Nothing to do: a worker speaks first."""

    def received(self, peer: int, packet: bytes) -> None:
        try:
            message, frames = self._read(peer, packet)
            if isinstance(message, Join):
                self._check_rank(peer, message.rank)
                if self._core.plan is None:
                    check_memory(message.plan)
                self._joined[peer] = message.rank
                self._admit(peer)  # before the answer, which may be a whole model
        except (ProtocolError, ConfigError) as error:
            self._do(self._core.broke(peer, str(error)))
            return
        effects = self._core.received(peer, message, frames)
        if self._journal is not None and peer in self._joined:
            self._journal.received(self._joined[peer], message, self._core.plan)
        self._do(effects)
        if isinstance(message, Join):
            self._admit(peer)
        if isinstance(message, Join | Leave | Contribution):  # with the first of these, learners are awaited
            self._await()

    def _read(self, peer: int, packet: bytes) -> tuple[Message, tuple[EncodedTensor, ...]]:
        """Decodes a packet; of a peer that has not joined, only a `Join` of a size that is allowed."""
        if peer in self._joined and self._allowance is not None:
            return parse(packet, limits=self._allowance.head)
        kind = kind_of(packet)
        if kind is not None and kind is not Join:
            raise ProtocolError(f"{kind.__name__} came before Join")
        if len(packet) > MAX_JOIN_NBYTES:
            raise ProtocolError(JOIN_TOO_LARGE)
        return parse(packet, limits=PacketLimits(0, MAX_JOIN_NBYTES))

    def closed(self, peer: int, error: str | None) -> None:
        self._joined.pop(peer, None)
        self._stop_counting(peer)
        self._do(self._core.closed(peer, error))
        self._await()

    def _await(self) -> None:
        """Gives workers that are to come back the time to do so."""
        awaited = self._core.awaited
        if self._awaiting:  # one that came, and went again, has the whole time once more
            self._away &= awaited
        elif awaited:
            self._awaiting, self._away = True, awaited
            self._clock.call_later(self._grace_s, partial(self._sender.call, self._overdue))

    def _overdue(self) -> None:
        self._awaiting = False
        self._do(self._core.overdue(self._away))
        self._await()

    def _admit(self, peer: int) -> None:
        """Lets a worker that has joined send what the plan's shapes allow, once there is a plan."""
        if self._core.plan is not None:
            if self._allowance is None or self._core.plan is not self._plan:
                self._plan, self._allowance = self._core.plan, allowance(self._core.plan)
            most = self._allowance.packet_nbytes
            reason = f"a packet of more than {most} bytes came, which is what the plan's shapes allow"
            broken = partial(self._core.broke, peer, reason)
            self._sender.limit(peer, most, lambda: self._do(broken()), self._allowance.kept_nbytes)

    def _check_rank(self, peer: int, rank: int) -> None:
        identity = self._sender.identity(peer)
        if identity.rank not in (None, rank):
            raise ProtocolError(
                f"rank {rank}: this worker's certificate or token is for rank {identity.rank}; use that rank's own"
            )

    def end(self, reason: str) -> None:
        """Ends the training early, see `ServerCore.end`. For any thread."""
        self._sender.call(lambda: self._do(self._core.end(reason)))

    def interrupted(self, peer: int) -> bool:
        """A session's connection broke; it may come back where it has joined."""
        if peer not in self._joined:
            return False  # a session that never joined has nothing to come back to; strangers open many
        self._do(self._core.interrupted(peer))
        if peer in self._joined:  # the answer may have been to end it
            over = partial(self._sender.call, partial(self._still_interrupted, peer))
            self._interrupted[peer] = self._clock.call_later(MOMENT_S, over)
        return True

    def resumed(self, peer: int) -> None:
        """An interrupted session is back."""
        self._stop_counting(peer)
        self._core.resumed(peer)

    def _still_interrupted(self, peer: int) -> None:
        if self._interrupted.pop(peer, None) is not None:
            self._do(self._core.still_interrupted(peer))

    def _stop_counting(self, peer: int) -> None:
        if (cancel := self._interrupted.pop(peer, None)) is not None:
            cancel()

    def _plan_merge(self) -> None:
        """Has the core merge what learners have contributed, once its time has come."""
        at = self._core.merges_at
        if at is not None and (self._merges_at is None or at < self._merges_at):
            self._merges_at = at
            delay = max(0.0, at - self._clock.now())
            self._clock.call_later(delay, partial(self._sender.call, partial(self._merge, at)))

    def _merge(self, planned_at: float) -> None:
        if self._merges_at == planned_at:
            self._merges_at = None
        self._do(self._core.merge_due())

    def _do(self, effects: list[Effect]) -> None:
        self._plan_merge()
        if effects and self._checkpointer is not None:  # no worker goes on to a step that is two checkpoints ahead
            self._checkpointer.write_if_due()
        for effect in effects:
            match effect:
                case Tell(text):
                    _log.warning("%s", text)
                case Send(peers, message, frames):
                    if self._journal is not None:
                        self._journal.sent(message)
                    packet = pack(message, frames)
                    for peer in peers:
                        self._sender.send(peer, packet)
                case Close(peer, message, told):
                    if message is not None and not (told or self._core.failed):  # which is told at the end
                        what = "worker's session has ended" if message.lost else "worker was refused"
                        _log.warning("a %s: %s", what, message.reason)
                    self._sender.close(peer, None if message is None else pack(message))
        if self._on_end is not None and (self._core.finished or self._core.failed is not None):
            ended, self._on_end = self._on_end, None
            ended()
