"""The server's end of sessions over sockets: it listens, lets in who may, and has its handler called by the loop."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from thinwire.errors import ProtocolError, TransportError
from thinwire.transports.addresses import parse_address
from thinwire.transports.base import ANYBODY, HandlerFactory, wire_nbytes
from thinwire.transports.hosting import HostSender, HostServer, WireSession
from thinwire.transports.sockets import options as limits
from thinwire.transports.sockets.channel import Channel
from thinwire.transports.sockets.loop import READ, Loop
from thinwire.transports.sockets.options import GREETING, SocketOptions
from thinwire.transports.sockets.pipes import ClearPipe, TlsPipe, context
from thinwire.transports.trust import Caller

_BACKLOG = 128
_log = logging.getLogger(__name__)


def serve(
    handler_factory: HandlerFactory, address: str, *, options: SocketOptions | None = None, loop: Loop | None = None
) -> SocketServer:
    """Starts a server and returns once it listens.

    Args:
        handler_factory: called once with the sender; the handler is called on the loop's thread.
        address: `host:port`; port 0 takes a free one, which `Server.address` tells.
        options: limits and encryption; None takes the defaults.
        loop: whose thread serves; it is not closed with the server. None: one of its own.

    Raises:
        ConfigError: the address cannot be one, or beyond this machine nothing is encrypted.
        TransportError: the port is in use, or the host is not this machine's.
    """
    return SocketServer(handler_factory, address, options or SocketOptions(), loop)


class SocketServer(HostServer):
    """See `serve`."""

    def __init__(
        self, handler_factory: HandlerFactory, address: str, options: SocketOptions, loop: Loop | None
    ) -> None:
        super().__init__(options.max_message_nbytes, options.max_pending_nbytes)
        host, port = parse_address(address)
        options.check(host)
        self.options = options
        self._context = None if options.tls is None else context(options.tls, server=True)
        self._stopped = threading.Event()
        self._channels: set[SocketSession] = set()
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        try:
            self._listening = socket.create_server((host.strip("[]"), port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise TransportError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another port (0 takes a free one), and an "
                "address of this machine"
            ) from error
        self._listening.setblocking(False)
        self.address = f"{host}:{self._listening.getsockname()[1]}"
        self._handler = handler_factory(HostSender(self))
        self._own = loop is None
        self._loop = loop or Loop(f"thinwire-serve-{self.address}")
        self.post(partial(self._loop.watch, self._listening, self, READ))

    def post(self, call: Callable[[], None]) -> None:
        self._loop.post(call)

    def stop(self, grace_s: float = 5.0) -> None:
        def begin() -> None:
            self._stop(None if grace_s > 0 else f"the server at {self.address} went away", lingers=grace_s > 0)

        def cut() -> None:
            for session in list(self._channels):
                session.cut(f"the server at {self.address} stopped")

        self.post(begin)
        until = time.monotonic() + grace_s
        while self._channels and time.monotonic() < until and not self._stopped.wait(0.01):
            pass
        self.post(cut)
        self._end_thread()

    def wait(self, timeout_s: float | None = None) -> bool:
        stopped = self._stopped.wait(timeout_s)
        if stopped and self._failure is not None:
            raise self._failure
        return stopped

    # ---- what the loop calls

    def ready(self, events: int) -> None:
        """Somebody calls."""
        with suppress(BlockingIOError):
            while True:
                try:
                    sock, _ = self._listening.accept()
                except ConnectionError:
                    continue
                except BlockingIOError:
                    raise
                except OSError as error:  # no more files may be opened; in a second perhaps
                    _log.warning("%s takes no connection for now: %s", self.address, error)
                    self._loop.watch(self._listening, self, 0)
                    return
                if len(self._channels) >= limits.MAX_CONNECTIONS:
                    sock.close()
                    continue
                session = SocketSession(self, sock, self._loop, self.options)
                self._channels.add(session)
                session.channel.start()

    def look(self, now: float) -> None:
        """Goes on listening, where it could not for a moment."""
        if self._accepting:
            self._loop.watch(self._listening, self, READ)

    # ---- what sessions call

    def pipe(self) -> ClearPipe | TlsPipe:
        """Returns a new connection's."""
        return ClearPipe() if self._context is None else TlsPipe(self._context, None)

    def let_in(self, session: SocketSession, names: tuple[str, ...]) -> str | None:
        """A connection's handshake is done: begins its session, or returns why not."""
        ask = self.options.authenticate
        try:
            session.identity = ANYBODY if ask is None else ask(Caller(None, names))
        except ProtocolError as stranger:
            self._warn(names, stranger)
            return f"it does not let this worker in: {stranger}"
        if (full := self._is_full(session.identity)) is not None:
            return full
        session.peer = self.number()
        self._sessions[session.peer] = session
        session.channel.send(GREETING)
        self.tell(lambda: self._handler.opened(session.peer))
        return None

    def came(self, session: SocketSession, packet: bytes) -> None:
        """Hands a packet to the handler."""
        self.bytes_received += wire_nbytes(packet)
        self.tell(partial(self._handler.received, session.peer, packet))

    def over(self, session: SocketSession, error: str | None) -> None:
        """A session is over; the handler may be inside one of its methods, and hears of it after that."""
        del self._sessions[session.peer]
        self.post(lambda: self.tell(lambda: self._handler.closed(session.peer, error)))

    def gone(self, session: SocketSession) -> None:
        """A connection is closed."""
        self._channels.discard(session)

    # ---- the end

    def _stop_failed(self, reason: str) -> None:
        self._stop(reason, lingers=True)
        if self._own:
            threading.Thread(target=self.stop, args=(1.0,), daemon=True).start()

    def _stop(self, error: str | None, *, lingers: bool) -> None:
        """Takes no more connections and ends all sessions."""
        if self._accepting:
            self._accepting = False
            self._loop.forget(self._listening)
            for peer, session in list(self._sessions.items()):
                if not isinstance(session, SocketSession):
                    self.end(peer, error)
                elif error is None:
                    session.close()
                elif lingers:
                    session.end(error)
            for each in list(self._channels):
                if not lingers:
                    each.cut(error)
                elif each.peer < 0:
                    each.channel.close()
                    self.gone(each)
            self.post(lambda: self.post(self._stopped.set))  # after the handler has heard of the ends

    def _end_thread(self) -> None:
        if self._own:
            self._loop.close()
        self._stopped.set()


class SocketSession(WireSession):
    """One connection of the server; a session once its peer is let in."""

    def __init__(self, server: SocketServer, sock: socket.socket, loop: Loop, options: SocketOptions) -> None:
        super().__init__(ANYBODY, options.max_message_nbytes, options.max_pending_nbytes)
        self.peer = -1
        self.channel = Channel(loop, sock, server.pipe(), self)
        self._server = server
        self._leaving = self._over = False

    # ---- for the server

    @property
    def closing(self) -> bool:
        return self._leaving or self._over

    def _queue(self, packet: bytes) -> None:
        self.channel.send(packet)

    def close(self) -> None:
        self._leaving = True
        self.channel.finish()

    def end(self, error: str | None) -> None:
        if not self._over:
            self._over = True
            self.channel.finish(error)
            if self.peer >= 0:
                self._server.over(self, error)

    def cut(self, error: str | None) -> None:
        """Ends it without a word to the peer."""
        self.channel.close()
        self.ended(error or "the server stopped")

    # ---- for the channel

    def opened(self, names: tuple[str, ...]) -> None:
        if (refusal := self._server.let_in(self, names)) is not None:
            self._over = True
            self.channel.finish(refusal)

    def received(self, packet: bytes) -> None:
        if not self.closing:
            self._server.came(self, packet)

    def exceeded(self) -> None:
        if not self.closing:
            self._server.tell(self.too_large)

    def sent(self, packet: bytes) -> None:
        if packet is not GREETING:
            self.pending_nbytes -= wire_nbytes(packet)
            self._server.bytes_sent += wire_nbytes(packet)

    def said_goodbye(self) -> None:
        self.end(None)

    def finished(self) -> None:
        if not self._over:
            self._over = True
            self._server.over(self, None)

    def ended(self, reason: str) -> None:
        self._server.gone(self)
        if not self._over:
            self._over = True
            if self.peer >= 0:
                self._server.over(self, f"the worker went away: {reason}")
