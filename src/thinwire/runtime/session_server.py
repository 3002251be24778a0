"""Sessions that outlive their connections: a layer between a transport and a handler, to which each peer is a session.

The handler does not see a broken connection while its worker may reconnect; packets sent meanwhile are kept and sent
then. A worker that does not begin with `SessionOpen` has a session of one connection. A peer that has not joined has
lower limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from thinwire.errors import ProtocolError, SessionLostError
from thinwire.packets import kind_of, pack, parse
from thinwire.runtime.clock import Cancel, Clock, SystemClock
from thinwire.runtime.limits import (
    JOIN_TOO_LARGE,
    JOIN_WITHIN_S,
    MAX_ENDED,
    MAX_JOIN_NBYTES,
    MAX_KEPT_NBYTES,
    MAX_OPENING_NBYTES,
)
from thinwire.runtime.session import ReplayBuffer
from thinwire.schema import Acknowledged, Message, Refused, SessionAccepted, SessionOpen
from thinwire.transports.base import UNAUTHENTICATED, Handler, Identity, Sender

MAX_NAME = 64


class SessionHandler(Handler, Protocol):
    """A handler to which each peer is a session, which may lack a connection for a while."""

    def interrupted(self, peer: int) -> bool:
        """A session's connection broke; returns whether another may replace it."""

    def resumed(self, peer: int) -> None:
        """An interrupted session has a connection again."""


@dataclass(eq=False, slots=True)
class _Session:
    """One peer, as the handler sees it."""

    number: int
    name: str | None
    """The worker's name for it, with which the worker reconnects; None if it cannot reconnect."""
    peer: int | None
    """The transport's number of its connection; None if it has no connection."""
    identity: Identity
    """The identity that every connection of the session must prove."""
    buffer: ReplayBuffer = field(default_factory=ReplayBuffer)
    ended: bool = False
    """Whether the handler has ended it."""
    last: bytes | None = None
    """The packet that ended it."""
    cancel: Cancel | None = None
    """Cancels the end of the server's wait for the worker."""
    limit: tuple[int, Callable[[], None]] | None = None
    """The limit of each of its connections, once its worker has joined."""
    kept_nbytes: int = field(default_factory=lambda: MAX_KEPT_NBYTES)
    """Limit on the bytes that wait for its acknowledgement."""
    newest: int = 0
    """The worker's number of the newest connection that the server has seen."""


class SessionServer(Sender):
    """A transport's handler, and the sender of the handler of sessions, which `inner` makes.

    Args:
        inner, sender: of sessions; of the transport.
        grace_s: how long a worker may take to reconnect, in seconds; 0 reports every break at once.
        clock: by default the system's.
    """

    def __init__(
        self, inner: Callable[[Sender], SessionHandler], sender: Sender, grace_s: float, clock: Clock | None = None
    ) -> None:
        self._sender, self._grace_s, self._clock = sender, grace_s, clock or SystemClock()
        self._num_sessions = 0
        self._numbered: dict[int, _Session] = {}
        self._named: dict[str, _Session] = {}
        self._of_peer: dict[int, _Session] = {}
        self._joining: dict[int, Cancel] = {}
        self._replaced: set[int] = set()
        self._expiring: deque[tuple[float, str]] = deque()
        self._inner = inner(self)

    # ---- what the transport calls

    def opened(self, peer: int) -> None:
        """Limits the time and bytes until the worker joins; its first packet names the session."""
        late = partial(self._sender.call, partial(self._is_late, peer))
        self._joining[peer] = self._clock.call_later(JOIN_WITHIN_S, late)
        self._sender.limit(peer, MAX_JOIN_NBYTES, partial(self._refuse, peer, JOIN_TOO_LARGE))

    def received(self, peer: int, packet: bytes) -> None:
        """Gives the handler a packet, unless the packet is about the session itself."""
        if peer in self._replaced:
            return  # the session has another connection, which repeats this packet
        session, kind = self._of_peer.get(peer), kind_of(packet)
        try:
            message: Message | None = None
            if kind is Acknowledged or (kind is SessionOpen and session is None):
                if len(packet) > MAX_OPENING_NBYTES:
                    raise ProtocolError(f"a {kind.__name__} of {len(packet)} bytes; it takes a few dozen")
                message = parse(packet)[0]
            if isinstance(message, SessionOpen):
                self._open(peer, message)
                return
            session = session or self._begin(peer, None)
            if isinstance(message, Acknowledged):
                session.buffer.acknowledge(message.count)
                return
        except ProtocolError as error:
            if session is not None and not session.ended:  # the handler needs the reason
                self._abandon(session, str(error))
            else:
                self._refuse(peer, str(error), lost=isinstance(error, SessionLostError))
            return
        if session.buffer.record(packet) and self._outlives_breaks(session):
            self._sender.send(peer, pack(Acknowledged(count=session.buffer.received)))
        self._inner.received(session.number, packet)

    def closed(self, peer: int, error: str | None) -> None:
        """Ends the peer's session, or gives its worker time to reconnect."""
        self._replaced.discard(peer)
        if joining := self._joining.pop(peer, None):
            joining()
        session = self._of_peer.pop(peer, None)
        if session is None:
            return
        session.peer = None
        if error is None or session.ended or not self._outlives_breaks(session):
            self._end(session, error)
            return
        if not self._inner.interrupted(session.number):
            self._end(session, error)
        elif not session.ended:  # the handler may have ended it

            def give_up() -> None:
                if session.cancel is cancel and not session.ended:
                    self._end(session, f"{error}; it did not come back within {self._grace_s:g} s")

            session.cancel = cancel = self._clock.call_later(self._grace_s, partial(self._sender.call, give_up))

    # ---- what the handler calls, with a session's number in place of a peer's

    def send(self, peer: int, packet: bytes) -> None:
        """Sends a packet to a session: now if it is connected, and again after a break."""
        session = self._numbered.get(peer)
        if session is None or session.ended:
            return
        if self._outlives_breaks(session):
            waiting = session.buffer.nbytes
            session.buffer.append(packet)
            if waiting and session.buffer.nbytes > session.kept_nbytes:
                self._abandon(session, f"it did not acknowledge over {session.kept_nbytes} bytes")
                return
        if session.peer is not None:
            self._sender.send(session.peer, packet)

    def close(self, peer: int, packet: bytes | None = None) -> None:
        """Ends a session; a worker that is not connected receives the last packet when it reconnects."""
        session = self._numbered.get(peer)
        if session is None or session.ended:
            return
        session.ended, session.last = True, packet
        if session.peer is not None:
            self._sender.close(session.peer, packet)
        else:
            self._end(session, None)

    def call(self, callback: Callable[[], None]) -> None:
        self._sender.call(callback)

    def limit(self, peer: int, nbytes: int, exceeded: Callable[[], None], pending_nbytes: int = 0) -> None:
        """Limits a session's packets, and the bytes that wait for its acknowledgement, once its worker has joined."""
        if session := self._numbered.get(peer):
            session.limit = nbytes, exceeded
            session.kept_nbytes = max(session.kept_nbytes, pending_nbytes)
            self._admit(session)

    def identity(self, peer: int) -> Identity:
        session = self._numbered.get(peer)
        return UNAUTHENTICATED if session is None else session.identity

    # ---- sessions

    def _outlives_breaks(self, session: _Session) -> bool:
        return session.name is not None and self._grace_s > 0

    def _begin(self, peer: int, name: str | None) -> _Session:
        session = _Session(self._num_sessions, name, peer, self._sender.identity(peer))
        self._of_peer[peer] = self._numbered[session.number] = session
        self._num_sessions += 1
        if name is not None:
            self._named[name] = session
        self._inner.opened(session.number)
        return session

    def _admit(self, session: _Session) -> None:
        """Sets the limits of a joined worker on the session's connection.

        All kept packets may wait to be sent: after a `SessionAccepted` they are repeated at once.
        """
        if session.limit is not None and session.peer is not None:
            if joining := self._joining.pop(session.peer, None):
                joining()
            self._sender.limit(session.peer, *session.limit, session.kept_nbytes + MAX_OPENING_NBYTES)

    def _is_late(self, peer: int) -> None:
        """Refuses a peer that did not join in time, unless it joined while this call waited in the queue."""
        if peer in self._joining:
            self._refuse(peer, f"no Join came within {JOIN_WITHIN_S:g} s")

    def _refuse(self, peer: int, reason: str, *, lost: bool = False) -> None:
        self._sender.close(peer, pack(Refused(reason=reason, lost=lost)))

    def _open(self, peer: int, message: SessionOpen) -> None:
        if not 0 < len(message.session) <= MAX_NAME:
            raise ProtocolError(f"a session's name has 1 to {MAX_NAME} characters; {len(message.session)} came")
        self._forget_ended()
        session, repeated = self._named.get(message.session), tuple[bytes, ...]()
        if session is None:
            if message.received or message.acknowledged:
                raise SessionLostError(
                    "this server does not know the session: it was restarted, or it no longer waited for this worker. "
                    "A script with KeptSteps joins again; else resume all workers and shards from checkpoints of one "
                    "step"
                )
            session = self._begin(peer, message.session)
        elif session.identity != self._sender.identity(peer):
            raise ProtocolError(
                "this session is another worker's: continue with the certificate and rank that began it"
            )
        elif session.ended:
            self._sender.close(peer, session.last)
            return
        elif message.connection < session.newest:  # late packets of a connection that the worker has replaced
            self._replaced.add(peer)
            self._sender.close(peer)
            return
        else:
            session.buffer.acknowledge(message.received)
            repeated = session.buffer.unacknowledged
            if session.cancel is not None:
                session.cancel()
                session.cancel = None
            if session.peer is not None:  # the worker noticed first that the connection was lost
                self._replace(session)
            session.peer = peer
            self._of_peer[peer] = session
            self._admit(session)
            self._inner.resumed(session.number)
        session.newest = message.connection
        self._sender.send(peer, pack(SessionAccepted(received=session.buffer.received, grace_s=self._grace_s)))
        for packet in repeated:
            self._sender.send(peer, packet)

    def _forget_ended(self) -> None:
        """Drops the names of sessions that ended before the grace time, and of all but the last `MAX_ENDED`."""
        while self._expiring and (self._expiring[0][0] <= self._clock.now() or len(self._expiring) > MAX_ENDED):
            del self._named[self._expiring.popleft()[1]]

    def _replace(self, session: _Session, packet: bytes | None = None) -> None:
        """Closes a session's connection without ending the session."""
        assert session.peer is not None
        del self._of_peer[session.peer]
        self._replaced.add(session.peer)
        self._sender.close(session.peer, packet)
        session.peer = None

    def _abandon(self, session: _Session, error: str) -> None:
        """Ends a session because its worker, connected or not, broke the protocol."""
        if session.peer is not None:
            self._replace(session, pack(Refused(reason=error)))
        self._end(session, error)

    def _end(self, session: _Session, error: str | None) -> None:
        """Reports the end to the handler, once. The name stays while the worker may ask for the last packet."""
        if session.cancel is not None:
            session.cancel()
        del self._numbered[session.number]
        if session.name is not None and session.ended:
            self._expiring.append((self._clock.now() + self._grace_s, session.name))
            self._forget_ended()
        elif session.name is not None:
            del self._named[session.name]
        session.ended, session.buffer = True, ReplayBuffer()
        self._inner.closed(session.number, error)
