"""The common parts of servers: their peers' sessions, and the calls of the handler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from thinwire.transports.base import UNAUTHENTICATED, Handler, Identity, Sender, Server, check_packet, wire_nbytes


class Session(ABC):
    """One peer of a server, with the limits of its packets.

    Args:
        identity: of the peer.
        max_message_nbytes: largest packet that it may send, in bytes.
        max_pending_nbytes: bytes that may wait to be sent to it.

    Attributes:
        limit_nbytes: largest packet that it may send now.
        too_large: the call for a larger packet.
    """

    def __init__(self, identity: Identity, max_message_nbytes: int, max_pending_nbytes: int) -> None:
        self.identity = identity
        self.limit_nbytes = self._max_message_nbytes = max_message_nbytes
        self.too_large: Callable[[], None] = self._end_too_large
        self._max_pending_nbytes = max_pending_nbytes

    @property
    @abstractmethod
    def pending_nbytes(self) -> int:
        """Bytes to be sent, as `wire_nbytes` counts them."""

    @property
    @abstractmethod
    def closing(self) -> bool:
        """Whether the session accepts no more packets."""

    @abstractmethod
    def queue(self, packet: bytes) -> None:
        """Appends a packet to the pending ones."""

    @abstractmethod
    def finish(self) -> None:
        """Accepts no more packets; the session ends without error when the last is sent."""

    @abstractmethod
    def end(self, error: str | None) -> None:
        """Ends the session now, unless it is over."""

    def put(self, packet: bytes) -> None:
        """Queues a packet, or ends the session if too much is pending."""
        pending, most = self.pending_nbytes, self._max_pending_nbytes
        if pending and pending + wire_nbytes(packet) > most:
            self.end(f"the worker does not read: over {most} bytes pending")
        else:
            self.queue(packet)

    def limit(self, nbytes: int, exceeded: Callable[[], None], pending_nbytes: int) -> None:
        """See `Sender.limit`."""
        self._max_pending_nbytes = max(self._max_pending_nbytes, pending_nbytes)
        most = self._max_message_nbytes  # remains the upper bound
        self.limit_nbytes, self.too_large = min(nbytes, most), exceeded if nbytes < most else self._end_too_large

    def _end_too_large(self) -> None:
        most = self._max_message_nbytes
        self.end(f"a packet over the message limit of {most} bytes came; raise max_message_nbytes on both sides")


class HostServer(Server, Sender):
    """A server whose handler runs on one thread, and the sender of that handler.

    Args:
        max_message_nbytes: largest packet, in bytes.
        max_pending_nbytes: bytes that may wait to be sent to one peer.
    """

    _handler: Handler

    def __init__(self, max_message_nbytes: int, max_pending_nbytes: int) -> None:
        self.max_message_nbytes, self.max_pending_nbytes = max_message_nbytes, max_pending_nbytes
        self._sessions: dict[int, Session] = {}
        self._num_opened = 0
        self._accepting = True
        self._failure: Exception | None = None

    @abstractmethod
    def post(self, call: Callable[[], None]) -> None:
        """Queues a call among those of the handler, unless the server has stopped. Any thread may call it."""

    @abstractmethod
    def _stop_failed(self, reason: str) -> None:
        """Stops after an error of the handler: accepts no more sessions and ends all with the reason."""

    def begin(self, session: Session) -> int:
        """Begins a session; returns its peer's number."""
        peer, self._num_opened = self._num_opened, self._num_opened + 1
        self._sessions[peer] = session
        self.call_handler(lambda: self._handler.opened(peer))
        return peer

    def call_handler(self, call: Callable[[], None]) -> None:
        """Calls the handler. An error that it raises is a bug: the server stops and does not call it again."""
        if self._failure is None:
            try:
                call()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._stop_failed(f"the server failed: {type(error).__name__}: {error}")

    # ---- called by the handler

    def _open(self, peer: int) -> Session | None:
        """Returns the session of a peer while it accepts packets."""
        session = self._sessions.get(peer)
        return None if session is None or session.closing else session

    def send(self, peer: int, packet: bytes) -> None:
        check_packet(packet, self.max_message_nbytes)
        if session := self._open(peer):
            session.put(packet)

    def close(self, peer: int, packet: bytes | None = None) -> None:
        if packet is not None:
            self.send(peer, packet)
        if session := self._open(peer):
            session.finish()

    def call(self, callback: Callable[[], None]) -> None:
        self.post(lambda: self.call_handler(callback))

    def limit(self, peer: int, nbytes: int, exceeded: Callable[[], None], pending_nbytes: int = 0) -> None:
        if session := self._open(peer):
            session.limit(nbytes, exceeded, pending_nbytes)

    def identity(self, peer: int) -> Identity:
        session = self._sessions.get(peer)
        return UNAUTHENTICATED if session is None else session.identity
