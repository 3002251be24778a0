"""The server's end of sessions that outlive their connections, between a transport and its handler.

To the handler a peer is a session: a connection that breaks is not told for as long as its worker may come back, and
what is said meanwhile is kept and said then. Workers that do not begin with `Open` have sessions of one connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from thinwire.errors import ProtocolError
from thinwire.packets import kind_of, pack, parse
from thinwire.runtime.lane import Lane
from thinwire.schema import Heard, Open, Opened, Refused
from thinwire.transports.base import MAX_PENDING_NBYTES, Handler, HandlerFactory, Sender

MAX_NAME = 64
MAX_KEPT_NBYTES = 2 * MAX_PENDING_NBYTES
"""What may wait for a worker's word that it was heard: twice what the transport lets wait to be sent to it."""


class _Session:
    """One peer, as the handler sees it."""

    def __init__(self, number: int, name: str | None) -> None:
        self.number, self.name = number, name
        self.peer: int | None = None
        self.lane = Lane()
        self.ended = False
        self.last: bytes | None = None
        self.timer: threading.Timer | None = None
        self.breaks = 0


class LastingHandler:
    """See the top of this file.

    Args:
        inner: makes the handler of sessions.
        sender: the transport's.
        grace_s: how long a worker may take to come back, in seconds; 0 tells of every break at once.
    """

    def __init__(self, inner: HandlerFactory, sender: Sender, grace_s: float) -> None:
        self._sender, self._grace_s = sender, grace_s
        self._numbered: dict[int, _Session] = {}
        self._named: dict[str, _Session] = {}
        self._of_peer: dict[int, _Session] = {}
        self._replaced: set[int] = set()
        self._inner: Handler = inner(_SessionSender(self, sender))

    # ---- what the transport calls

    def opened(self, peer: int) -> None:
        """Nothing yet: the first packet says whose connection it is."""

    def received(self, peer: int, packet: bytes) -> None:
        if peer in self._replaced:
            return  # its session goes on on another connection, which repeats this
        session = self._of_peer.get(peer)
        try:
            if session is None and kind_of(packet) is Open:
                message, _ = parse(packet)
                assert isinstance(message, Open)
                self._open(peer, message)
                return
            session = session or self._begin(peer, None)
            if kind_of(packet) is Heard:
                message, _ = parse(packet)
                assert isinstance(message, Heard)
                session.lane.acknowledge(message.count)
                return
        except ProtocolError as error:
            self._sender.close(peer, pack(Refused(reason=str(error))))
            return
        if session.lane.hear(packet) and session.name is not None and self._grace_s > 0:
            self._sender.send(peer, pack(Heard(count=session.lane.heard)))
        self._inner.received(session.number, packet)

    def closed(self, peer: int, error: str | None) -> None:
        self._replaced.discard(peer)
        session = self._of_peer.pop(peer, None)
        if session is None:
            return
        session.peer = None
        if error is None or session.ended or session.name is None or self._grace_s <= 0:
            self._end(session, error)
            return
        breaks = session.breaks = session.breaks + 1
        over = partial(self._given_up, session, breaks, error)
        session.timer = threading.Timer(self._grace_s, self._sender.call, [over])
        session.timer.daemon = True
        session.timer.start()

    # ---- what the handler says

    def send(self, number: int, packet: bytes) -> None:
        """To a session: now where it is connected, and again later where that does not arrive."""
        session = self._numbered.get(number)
        if session is None or session.ended:
            return
        if session.name is not None and self._grace_s > 0:
            waiting = session.lane.kept_nbytes
            session.lane.say(packet)
            if waiting and session.lane.kept_nbytes > MAX_KEPT_NBYTES:
                self._abandon(session, f"it has not said that it heard over {MAX_KEPT_NBYTES} bytes")
                return
        if session.peer is not None:
            self._sender.send(session.peer, packet)

    def close(self, number: int, packet: bytes | None) -> None:
        """Ends a session; one that is not connected hears the last word when it comes back."""
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
        session = _Session(len(self._numbered), name)
        self._numbered[session.number] = session
        if name is not None:
            self._named[name] = session
        session.peer = peer
        self._of_peer[peer] = session
        self._inner.opened(session.number)
        return session

    def _open(self, peer: int, said: Open) -> None:
        if not 0 < len(said.session) <= MAX_NAME:
            raise ProtocolError(f"a session's name has 1 to {MAX_NAME} characters; {len(said.session)} came")
        session = self._named.get(said.session)
        if session is None:
            if said.heard or said.forgotten:
                raise ProtocolError(
                    "this server does not know the session: it was restarted, or it no longer waited for this worker. "
                    "Resume all workers and shards from checkpoints of one step"
                )
            self._begin(peer, said.session)
            self._sender.send(peer, pack(Opened(heard=0, grace_s=self._grace_s)))
            return
        if session.ended:
            self._sender.close(peer, session.last)
            return
        session.lane.acknowledge(said.heard)
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
        if session.peer is not None:  # the worker noticed first that the connection was lost
            old = session.peer
            del self._of_peer[old]
            self._replaced.add(old)
            self._sender.close(old)
        session.peer = peer
        self._of_peer[peer] = session
        self._sender.send(peer, pack(Opened(heard=session.lane.heard, grace_s=self._grace_s)))
        for packet in session.lane.unheard:
            self._sender.send(peer, packet)

    def _given_up(self, session: _Session, breaks: int, error: str) -> None:
        if session.breaks == breaks and session.peer is None and not session.ended:
            self._end(session, f"{error}; it did not come back within {self._grace_s:g} s")

    def _abandon(self, session: _Session, error: str) -> None:
        """Ends a session whose worker, connected or not, does not keep to the conversation."""
        if session.peer is not None:
            del self._of_peer[session.peer]
            self._replaced.add(session.peer)
            self._sender.close(session.peer, pack(Refused(reason=error)))
            session.peer = None
        self._end(session, error)

    def _end(self, session: _Session, error: str | None) -> None:
        """The handler hears of the end, once; the name stays for as long as a last word may be asked for."""
        if session.timer is not None:
            session.timer.cancel()
        if not session.ended and session.name is not None:
            self._named.pop(session.name, None)
        session.ended, session.lane = True, Lane()
        self._inner.closed(session.number, error)


class _SessionSender(Sender):
    """What the handler answers with: session numbers in place of peers."""

    def __init__(self, lasting: LastingHandler, sender: Sender) -> None:
        self._lasting, self._sender = lasting, sender

    def send(self, peer: int, packet: bytes) -> None:
        self._lasting.send(peer, packet)

    def close(self, peer: int, packet: bytes | None = None) -> None:
        self._lasting.close(peer, packet)

    def call(self, callback: Callable[[], None]) -> None:
        self._sender.call(callback)


def lasting(inner: HandlerFactory, grace_s: float) -> HandlerFactory:
    """Returns a handler factory whose handler's peers are sessions that outlive their connections."""
    return lambda sender: LastingHandler(inner, sender, grace_s)
