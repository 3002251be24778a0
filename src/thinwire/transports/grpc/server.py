"""The server's end of gRPC sessions: one asyncio loop in a separate thread.

All work runs on that loop, so the handler is never entered twice and no state needs a lock. Each session has a task
that reads and one that writes from a queue with a byte limit: a peer that does not read must not fill our memory. The
first of these events sets a session's future and so ends the session: the worker's goodbye, the handler's `close`, a
limit, a crash at either end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from thinwire.errors import ConfigError, ProtocolError, TransportError
from thinwire.extras import optional
from thinwire.transports.addresses import is_loopback, parse_address
from thinwire.transports.base import (
    UNAUTHENTICATED,
    HandlerFactory,
    Identity,
    message_wire_nbytes,
)
from thinwire.transports.grpc import options as limits
from thinwire.transports.grpc.chunks import Assembly, split
from thinwire.transports.grpc.descriptors import room_for
from thinwire.transports.grpc.health import health_server
from thinwire.transports.grpc.options import (
    GOODBYE,
    GREETING,
    METHOD,
    SERVICE,
    TOKEN_KEY,
    TOKEN_SCHEME,
    GrpcOptions,
)
from thinwire.transports.grpc.sessions import StreamSession
from thinwire.transports.hosting import HostServer
from thinwire.transports.trust import Caller

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[bytes, bytes]
else:
    grpc = optional("grpc", "a parameter server")

_log = logging.getLogger(__name__)

MAX_SESSIONS = 4096
MAX_SESSIONS_EACH = 8
"""Sessions of one rank's certificate or token: an old one that is not yet known to be dead, and its successors."""


def check_free(host: str, port: int) -> None:
    """Raises TransportError where the port is in use, or the host is not this machine's; gRPC only logs the cause."""
    address = f"{host}:{port}"
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise TransportError(
            f"cannot listen on {address}: {host} is no address, and no name that this machine can look up; "
            "0.0.0.0 listens on all of its addresses"
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC: closed connections do not use a port
        try:
            probe.bind(where)
            probe.listen(1)
        except OSError as error:
            reason = {
                errno.EADDRINUSE: f"port {port} is in use; choose another one (0 takes a free one)",
                errno.EADDRNOTAVAIL: f"{host} is not an address of this machine; 0.0.0.0 listens on all of its "
                "addresses",
            }.get(error.errno or 0, str(error.strerror))
            raise TransportError(f"cannot listen on {address}: {reason}") from error


def _shows_no_header(record: logging.LogRecord) -> bool:
    """Drops gRPC's log line on a header that is not text: it quotes the header, which may be a token."""
    return not str(record.msg).startswith("Invalid encoding")


def serve(handler_factory: HandlerFactory, address: str, *, options: GrpcOptions | None = None) -> GrpcServer:
    """Starts a server and returns once it listens.

    Args:
        handler_factory: called once with the sender, on the server's thread; returns the handler.
        address: `host:port` or `grpc://host:port`; port 0 takes a free one, see `Server.address`.
        options: limits, keepalive, shaping and encryption; None takes the defaults.

    Raises:
        ConfigError: the address is invalid, TLS lacks the server's certificate, or beyond this machine the options
            would admit any caller.
        TransportError: the port is in use, or the host is not this machine's.
    """
    return GrpcServer(handler_factory, address, options or GrpcOptions())


class GrpcServer(HostServer):
    """See `serve`."""

    def __init__(self, handler_factory: HandlerFactory, address: str, options: GrpcOptions) -> None:
        self._host, self._port = parse_address(address)
        if options.tls is not None and options.tls.key is None:
            raise ConfigError("a server with TLS needs certificate and key")
        options.check_server(self._host)
        super().__init__(options.max_message_nbytes, options.max_pending_nbytes)
        self.options, self.health_address = options, ""
        self._grace_s, self._warned = 0.0, -math.inf
        logging.getLogger("grpc._cython.cygrpc").addFilter(_shows_no_header)
        self._loop: asyncio.AbstractEventLoop
        self._stopping: asyncio.Event
        listening: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run, args=(handler_factory, listening), name=f"thinwire-serve-{address}", daemon=True
        )
        self._thread.start()
        try:
            port = listening.result()
        except BaseException:
            self._thread.join()
            raise
        self.address = f"{self._host}:{port}"

    def stop(self, grace_s: float = 5.0) -> None:
        def begin() -> None:
            self._grace_s = grace_s
            self._accepting = False
            self._stopping.set()

        self.post(begin)
        self._thread.join()

    def wait(self, timeout_s: float | None = None) -> bool:
        self._thread.join(timeout_s)
        stopped = not self._thread.is_alive()
        if stopped and self._failure is not None:
            raise self._failure
        return stopped

    def post(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    def _stop_failed(self, reason: str) -> None:
        self._accepting = False
        for session in self._sessions.values():
            session.end(reason)
        self._grace_s = 1.0  # for the sessions to send the text
        self._stopping.set()

    def _run(self, handler_factory: HandlerFactory, listening: concurrent.futures.Future[int]) -> None:
        try:
            asyncio.run(self._main(handler_factory, listening))
        except Exception as error:
            if listening.done():
                self._failure = self._failure or error
            else:
                listening.set_exception(error)

    async def _main(self, handler_factory: HandlerFactory, listening: concurrent.futures.Future[int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        server = grpc.aio.server(options=self.options.channel_arguments(self._connections()))
        port = self._bind(server)
        self._handler = handler_factory(self)
        method = grpc.stream_stream_rpc_method_handler(self._converse)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: method}),))
        probed = self._bind_health()
        await server.start()
        if probed is not None:
            await probed.start()
        listening.set_result(port)
        await self._stopping.wait()
        if probed is not None:
            await probed.stop(0)
        if self._grace_s > 0:
            for session in list(self._sessions.values()):
                session.finish()
        await server.stop(self._grace_s)
        # gRPC logs an error for each of its tasks that the end of the loop cancels: let them finish.
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=1.0)

    def _connections(self) -> int:
        """Returns the most concurrent connections; warns where descriptors reduce them and any caller may connect."""
        possible = room_for(limits.MAX_CONNECTIONS)
        if possible < limits.MAX_CONNECTIONS and not is_loopback(self._host):
            _log.warning(
                "this process may have too few files open for %s connections, and takes %s: any caller can use them up "
                "and keep workers out; raise the hard limit (ulimit -Hn)",
                f"{limits.MAX_CONNECTIONS:,}",
                f"{possible:,}",
            )
        return possible

    def _bind_health(self) -> grpc.aio.Server | None:
        """Binds the port for health probes, if the options have one."""
        if self.options.health is None:
            return None
        host, port = parse_address(self.options.health)
        check_free(host, port)
        server = health_server()
        self.health_address = f"{host}:{server.add_insecure_port(f'{host}:{port}')}"
        return server

    def _bind(self, server: grpc.aio.Server) -> int:
        address, tls = f"{self._host}:{self._port}", self.options.tls
        check_free(self._host, self._port)
        try:
            if tls is None:
                return server.add_insecure_port(address)
            assert tls.key is not None and tls.certificate is not None
            credentials = grpc.ssl_server_credentials(
                [(tls.key, tls.certificate)], tls.root, require_client_auth=tls.root is not None
            )
            return server.add_secure_port(address, credentials)
        except RuntimeError as error:
            if tls is None:
                raise TransportError(f"cannot listen on {address}: {error}") from error
            raise ConfigError(
                "the server's certificate, key or ca (--tls-cert, --tls-key, --tls-ca) is not taken: PEM text that is "
                "damaged, or a key that is another certificate's"
            ) from error

    async def _converse(self, _requests: object, context: Context) -> None:
        """Runs one session, from the first byte to the status. It reads nothing of a caller that is not admitted."""
        try:
            identity = self._identify(context)
        except ProtocolError as stranger:
            self._warn(context.peer(), stranger)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(stranger))
        if (full := self._is_full(identity)) is not None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, full)
        session = StreamSession(self.options, identity)
        peer = self.begin(session)
        tasks: list[asyncio.Task[None]] = []
        try:
            # Before the first message is written: gRPC allows one write at a time.
            await context.send_initial_metadata((GREETING,))
            for work in (self._read(peer, session, context), self._write(session, context)):
                task = asyncio.create_task(work)
                task.add_done_callback(lambda task: session.end(self._why_lost(task)))
                tasks.append(task)
            # Not a plain await, through which a cancellation by gRPC would also cancel the future.
            await asyncio.wait([session.over])
        finally:
            # Also when gRPC cancels this task, for a lost connection or our own hard stop.
            session.end(self._why_lost())
            # No await from here on: a hard stop cancels this task twice, and the handler must be called.
            for task in tasks:
                task.cancel()
            del self._sessions[peer]
            error = session.over.result()
            self.call_handler(lambda: self._handler.closed(peer, error))
        if error is not None:
            await context.abort(grpc.StatusCode.ABORTED, error)

    def _warn(self, who: object, stranger: ProtocolError) -> None:
        """Logs a refused caller, once a second at most; if the server's own files are at fault, with the cause."""
        if (now := time.monotonic()) - self._warned >= 1.0:
            self._warned = now
            fault = f": {cause}" if isinstance(cause := stranger.__cause__, ConfigError) else ""
            _log.warning("%s was not let in: %s%s", who, stranger, fault)

    def _is_full(self, identity: Identity) -> str | None:
        """Returns why there is no room for another session; None where there is."""
        if len(self._sessions) >= MAX_SESSIONS:
            return f"the server has {MAX_SESSIONS} sessions, and takes no more"
        own = 0 if identity.rank is None else sum(each.identity == identity for each in self._sessions.values())
        if own >= MAX_SESSIONS_EACH:
            return f"rank {identity.rank} has {own} sessions with the server, and may have no more"
        return None

    def _identify(self, context: Context) -> Identity:
        """Returns the caller's identity. Raises ProtocolError where the caller does not prove it."""
        if self.options.authenticate is None:
            return UNAUTHENTICATED
        shown = dict(context.invocation_metadata() or ()).get(TOKEN_KEY)
        token = shown.removeprefix(TOKEN_SCHEME) if isinstance(shown, str) else None
        proved: Mapping[str, Iterable[bytes]] = context.auth_context()
        names = [name for key in ("x509_common_name", "x509_subject_alternative_name") for name in proved.get(key, ())]
        return self.options.authenticate(Caller(token, tuple(dict.fromkeys(name.decode() for name in names))))

    def _why_lost(self, task: asyncio.Task[None] | None = None) -> str:
        """Returns why a session broke that neither end has ended; `task` is the reading or writing task that failed."""
        if task is not None and not task.cancelled() and (error := task.exception()) is not None:
            return f"the connection broke: {error}"
        return "the server stopped" if self._stopping.is_set() else "the worker went away"

    async def _read(self, peer: int, session: StreamSession, context: Context) -> None:
        shaping, assembly = self.options.shaping, Assembly()
        while True:
            with session.in_time("sends a packet") if assembly.nbytes else contextlib.nullcontext():
                message: Any = await context.read()  # bytes, or the end of the stream
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                session.end(self._why_lost())
                return
            nbytes = message_wire_nbytes(len(message))
            if shaping is not None:
                await asyncio.sleep(shaping.ingress.arrival_delay(nbytes, time.monotonic()))
            if message == GOODBYE and not assembly.nbytes:
                session.end(None)
                return
            self.bytes_received += nbytes
            packet = assembly.add(message)
            if session.closing:
                assembly.drop()
            elif max(assembly.nbytes, len(packet or b"")) > session.limit_nbytes:
                assembly.drop()
                self.call_handler(session.too_large)
                await asyncio.wait([session.over])  # without reading more
            elif packet is not None:
                self.call_handler(partial(self._handler.received, peer, packet))

    async def _write(self, session: StreamSession, context: Context) -> None:
        shaping = self.options.shaping
        while (packet := await session.next()) is not None:
            for message in split(packet):
                nbytes = message_wire_nbytes(len(message))
                if shaping is not None:
                    await asyncio.sleep(shaping.egress.delay(nbytes, time.monotonic()))
                self.bytes_sent += nbytes
                # Before the write: the peer may receive the packet and request more before `write` returns.
                session.pending_nbytes -= nbytes
                with session.in_time("reads"):
                    await context.write(message)
        session.end(None)
