"""The server's end of sessions that outlive their connections, between a transport and its handler.

To the handler a peer is a session: a connection that breaks is not reported for as long as its worker may come back,
and what is sent meanwhile is kept and sent then. A worker that does not begin with `SessionOpen` has a session of one
connection.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from thinwire.errors import ProtocolError
from thinwire.packets import kind_of, pack, parse
from thinwire.runtime.replay_buffer import ReplayBuffer
from thinwire.schema import Acknowledged, Refused, SessionAccepted, SessionOpen
from thinwire.transports.base import MAX_PENDING_NBYTES, Handler, HandlerFactory, Sender

MAX_NAME = 64
MAX_KEPT_NBYTES = 2 * MAX_PENDING_NBYTES
"""What may wait for a worker's acknowledgement: twice what the transport lets wait to be sent to it."""


class _Session:
    """One peer, as the handler sees it."""

    def __init__(self, number: int, name: str | None) -> None:
        self.number, self.name = number, name
        self.peer: int | None = None
        """The transport's number of its connection; None while it has none."""
        self.buffer = ReplayBuffer()
        self.ended = False
        """Whether the handler has ended it."""
        self.last: bytes | None = None
        self.timer: threading.Timer | None = None
        self.breaks = 0


class SessionServer:
    """A transport's handler; see the top of this file.

    Args:
        inner: makes the handler of sessions.
        sender: the transport's.
        grace_s: how long a worker may take to come back, in seconds; 0 reports every break at once.
    """

    def __init__(self, inner: HandlerFactory, sender: Sender, grace_s: float) -> None:
        self._sender, self._grace_s = sender, grace_s
        self._num_sessions = 0
        self._numbered: dict[int, _Session] = {}
        self._named: dict[str, _Session] = {}
        self._of_peer: dict[int, _Session] = {}
        self._replaced: set[int] = set()
        self._expiring: deque[tuple[float, str]] = deque()
        self._inner: Handler = inner(_SessionSender(self, sender))

    # ---- what the transport calls

    def opened(self, peer: int) -> None:
        """Does nothing yet: the first packet says whose connection it is."""

    def received(self, peer: int, packet: bytes) -> None:
        """Passes a packet on to the handler, unless it is about the session itself."""
        if peer in self._replaced:
            return  # its session goes on on another connection, which repeats this
        session = self._of_peer.get(peer)
        kind = kind_of(packet)
        try:
            if session is None and kind is SessionOpen:
                message, _ = parse(packet)
                assert isinstance(message, SessionOpen)
                self._open(peer, message)
                return
            session = session or self._begin(peer, None)
            if kind is Acknowledged:
                message, _ = parse(packet)
                assert isinstance(message, Acknowledged)
                session.buffer.acknowledge(message.count)
                return
        except ProtocolError as error:
            self._sender.close(peer, pack(Refused(reason=str(error))))
            return
        if session.buffer.record(packet) and session.name is not None and self._grace_s > 0:
            self._sender.send(peer, pack(Acknowledged(count=session.buffer.received)))
        self._inner.received(session.number, packet)

    def closed(self, peer: int, error: str | None) -> None:
        """Ends the peer's session, or gives its worker the time to come back."""
        self._replaced.discard(peer)
        session = self._of_peer.pop(peer, None)
        if session is None:
            return
        session.peer = None
        if error is None or session.ended or session.name is None or self._grace_s <= 0:
            self._end(session, error)
            return
        breaks = session.breaks = session.breaks + 1
        over = partial(self._give_up, session, breaks, error)
        session.timer = threading.Timer(self._grace_s, self._sender.call, [over])
        session.timer.daemon = True
        session.timer.start()

    # ---- what the handler calls, through its sender

    def send(self, number: int, packet: bytes) -> None:
        """Sends to a session: now where it is connected, and again later where that does not arrive."""
        session = self._numbered.get(number)
        if session is None or session.ended:
            return
        if session.name is not None and self._grace_s > 0:
            waiting = session.buffer.nbytes
            session.buffer.append(packet)
            if waiting and session.buffer.nbytes > MAX_KEPT_NBYTES:
                self._abandon(session, f"it did not acknowledge over {MAX_KEPT_NBYTES} bytes")
                return
        if session.peer is not None:
            self._sender.send(session.peer, packet)

    def close(self, number: int, packet: bytes | None) -> None:
        """Ends a session; one that is not connected is sent the last packet when it comes back."""
        session = self._numbered.get(number)
        if session is None or session.ended:
            return
        session.ended, session.last = True, packet
        if session.peer is not None:
            self._sender.close(session.peer, packet)
        else:
            self._end(session, None)

    # ---- sessions

    def _begin(self, peer: int, name: str | None) -> _Session:
        session = _Session(self._num_sessions, name)
        self._num_sessions += 1
        self._numbered[session.number] = session
        if name is not None:
            self._named[name] = session
        session.peer = peer
        self._of_peer[peer] = session
        self._inner.opened(session.number)
        return session

    def _open(self, peer: int, message: SessionOpen) -> None:
        if not 0 < len(message.session) <= MAX_NAME:
            raise ProtocolError(f"a session's name has 1 to {MAX_NAME} characters; {len(message.session)} came")
        self._expire()
        session = self._named.get(message.session)
        if session is None:
            if message.received or message.acknowledged:
                raise ProtocolError(
                    "this server does not know the session: it was restarted, or it no longer waited for this worker. "
                    "Resume all workers and shards from checkpoints of one step"
                )
            self._begin(peer, message.session)
            self._sender.send(peer, pack(SessionAccepted(received=0, grace_s=self._grace_s)))
            return
        if session.ended:
            self._sender.close(peer, session.last)
            return
        session.buffer.acknowledge(message.received)
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
        if session.peer is not None:  # the worker noticed first that the connection was lost
            self._replace(session)
        session.peer = peer
        self._of_peer[peer] = session
        self._sender.send(peer, pack(SessionAccepted(received=session.buffer.received, grace_s=self._grace_s)))
        for packet in session.buffer.unacknowledged:
            self._sender.send(peer, packet)

    def _replace(self, session: _Session, packet: bytes | None = None) -> None:
        """Closes a session's connection without ending the session."""
        assert session.peer is not None
        del self._of_peer[session.peer]
        self._replaced.add(session.peer)
        self._sender.close(session.peer, packet)
        session.peer = None

    def _give_up(self, session: _Session, breaks: int, error: str) -> None:
        if session.breaks == breaks and session.peer is None and not session.ended:
            self._end(session, f"{error}; it did not come back within {self._grace_s:g} s")

    def _abandon(self, session: _Session, error: str) -> None:
        """Ends a session whose worker, connected or not, does not keep to the conversation."""
        if session.peer is not None:
            self._replace(session, pack(Refused(reason=error)))
        self._end(session, error)

    def _end(self, session: _Session, error: str | None) -> None:
        """Tells the handler of the end, once. The name stays for as long as its last packet may be asked for."""
        if session.timer is not None:
            session.timer.cancel()
        del self._numbered[session.number]
        if session.name is not None and session.ended:
            self._expiring.append((time.monotonic() + self._grace_s, session.name))
        elif session.name is not None:
            del self._named[session.name]
        session.ended, session.buffer = True, ReplayBuffer()
        self._inner.closed(session.number, error)

    def _expire(self) -> None:
        """Forgets the names of sessions that ended longer ago than their workers may take to come back."""
        while self._expiring and self._expiring[0][0] <= time.monotonic():
            del self._named[self._expiring.popleft()[1]]


class _SessionSender(Sender):
    """The handler's sender: session numbers in place of peers."""

    def __init__(self, server: SessionServer, sender: Sender) -> None:
        self._server, self._sender = server, sender

    def send(self, peer: int, packet: bytes) -> None:
        self._server.send(peer, packet)

    def close(self, peer: int, packet: bytes | None = None) -> None:
        self._server.close(peer, packet)

    def call(self, callback: Callable[[], None]) -> None:
        self._sender.call(callback)


def session_server(inner: HandlerFactory, grace_s: float) -> HandlerFactory:
    """Returns a handler factory whose handler's peers are sessions that outlive their connections."""
    return lambda sender: SessionServer(inner, sender, grace_s)
