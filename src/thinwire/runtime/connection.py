"""The worker's connection to a server: opened by address, and replaced when it breaks.

Its user sees one connection that is sometimes slow. After a break it opens another, with growing pauses between the
attempts; both ends then repeat the messages that the other has not received, so every message arrives once, and the
cores see no break. If the server does not wait (`SessionAccepted.grace_s`), a break ends the session at once.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from thinwire.errors import ConfigError, DeadlineError, TransportError
from thinwire.packets import kind_of
from thinwire.runtime.clock import check_seconds
from thinwire.runtime.limits import JOIN_WITHIN_S
from thinwire.runtime.session import Dial, Pause, Reconnection, Repeat, WorkerSession
from thinwire.schema import Refused
from thinwire.transports.addresses import parse_address
from thinwire.transports.base import MAX_MESSAGE_NBYTES, Connection, check_packet
from thinwire.transports.grpc import GrpcOptions
from thinwire.transports.grpc import client as grpc_client

_log = logging.getLogger(__name__)

SESSION_NBYTES = 16
"""A session's name is a secret of 128 bits: a process that knows it can act as the worker."""

Connect = Callable[[float], Connection]
"""Opens a connection; the argument limits the wait for the server, in seconds."""


def server_address(server: str) -> str:
    """Returns `host:port` of `grpc://host:port`.

    Raises:
        ConfigError: another form, no host, or no port.

    Example:
        >>> server_address("grpc://10.0.0.1:7070")
        '10.0.0.1:7070'
    """
    scheme, _, address = server.partition("://")
    if scheme != "grpc" or not address:
        raise ConfigError(f"server={server!r}; expected grpc://host:port")
    parse_address(address)
    return address


def connect(
    server: str | Connection,
    *,
    connect_timeout_s: float = 30.0,
    reconnect_s: float = 0.0,
    options: GrpcOptions | None = None,
) -> Connection:
    """Returns a connection to `grpc://host:port`, once the server answers; returns a Connection unchanged.

    Args:
        server: the address, or a connection.
        connect_timeout_s: how long to wait for the server, in seconds.
        reconnect_s: how long the connection tries to replace a broken one, in seconds; 0: it does not.
        options: of gRPC.

    Raises:
        ConfigError: an address of another form, or a duration out of range.
        DeadlineError: no server answers at that address.
    """
    if isinstance(server, Connection):
        return server
    check_seconds(connect_timeout_s=connect_timeout_s, reconnect_s=reconnect_s)
    address = server_address(server)

    if reconnect_s <= 0:
        return grpc_client.connect(address, connect_timeout_s=connect_timeout_s, options=options)
    return ReconnectingConnection(
        lambda timeout_s: grpc_client.connect(address, connect_timeout_s=timeout_s, options=options),
        connect_timeout_s=connect_timeout_s,
        reconnect_s=reconnect_s,
        max_message_nbytes=(options or GrpcOptions()).max_message_nbytes,
    )


def connect_all(servers: Sequence[str | Connection], **options: Any) -> list[Connection]:
    """Connects to every shard as `connect` does; if one cannot be reached, closes the connections that opened.

    A server ends a connection on which no worker joins in time, and a worker joins once it has reached all shards. A
    connection that has waited long when the last shard answers is opened anew.
    """
    opened: list[Connection] = []
    since: list[float] = []
    try:
        for server in servers:
            opened.append(connect(server, **options))
            since.append(time.monotonic())
        for shard, server in enumerate(servers):
            if isinstance(server, str) and time.monotonic() - since[shard] > JOIN_WITHIN_S / 2:
                opened[shard].abort()
                opened[shard] = connect(server, **options)
    except BaseException:
        for each in opened:
            with contextlib.suppress(Exception):
                each.close()
        raise
    return opened


class ReconnectingConnection(Connection):
    """A connection that is replaced when it breaks.

    Args:
        connect: opens a connection to the server, always the same one.
        connect_timeout_s: how long to wait for the server at first, in seconds.
        reconnect_s: how long this end tries to replace a broken connection, in seconds.
        max_message_nbytes: largest packet that the transport accepts.

    Raises:
        DeadlineError: the server does not answer.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        connect_timeout_s: float,
        reconnect_s: float,
        max_message_nbytes: int = MAX_MESSAGE_NBYTES,
    ) -> None:
        self._connect, self._max_message_nbytes, self._patience_s = connect, max_message_nbytes, reconnect_s
        # Held while a packet is sent, so that packets are sent in the order in which the session keeps them, and while
        # the connection is replaced.
        self._sending = threading.RLock()
        # Held briefly: guards the session's counts and `_counted`.
        self._counting = threading.Lock()
        self._connection = connect(connect_timeout_s)
        self._counted: Connection | None = self._connection
        """The connection with counted packets; None during a replacement: the server then repeats its packets."""
        self.address = self._connection.address
        self._session = WorkerSession(
            secrets.token_hex(SESSION_NBYTES), self.address, reconnect_s=reconnect_s, now=time.monotonic
        )
        self._sent = self._received = 0
        self._connection.send(self._session.opening())

    @property
    def reconnections(self) -> int:
        """The number of replaced connections."""
        return self._session.reconnections

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]  # sums over all connections
        """See `Connection`."""
        return self._sent + self._connection.bytes_sent

    @property
    def bytes_received(self) -> int:  # type: ignore[override]
        """See `Connection`."""
        return self._received + self._connection.bytes_received

    def send(self, packet: bytes) -> None:
        check_packet(packet, self._max_message_nbytes)
        with self._sending:
            self._session.check()
            with self._counting:
                self._session.send(packet)
            try:
                self._connection.send(packet)
            except TransportError as error:
                self._replace(self._connection, error)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._session.check()
            connection = self._connection
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                packet = connection.receive(left)
            except DeadlineError:
                raise
            except TransportError as error:
                self._replace(connection, error)
                continue
            if packet is None:
                return None
            with self._counting:
                if connection is not self._counted and kind_of(packet) is not Refused:
                    continue  # another thread is replacing it, or has: the server repeats this packet
                mine, answer = self._session.receive(packet)
            if answer is not None:
                with contextlib.suppress(TransportError):  # the next send or receive notices
                    connection.send(answer)
            if mine:
                return packet

    def close(self, timeout_s: float = 30.0) -> None:
        self._end().close(timeout_s)

    def abort(self) -> None:
        self._end().abort()

    def _end(self) -> Connection:
        """Ends the session, and returns its connection, which is not replaced any more."""
        with self._counting:
            self._session.over = self._session.over or f"this end has closed the session with {self.address}"
            return self._connection

    def _replace(self, broken: Connection, error: TransportError) -> None:
        """Replaces a broken connection, unless another thread has done so. Raises `error` if it cannot."""
        with self._sending:
            if self._connection is not broken:
                return
            reconnection = self._session.reconnect(error, partial(_arrived, broken))
            with self._counting:
                self._counted = None
            connection = self._carry_out(reconnection, error)
            with self._counting:
                ended = self._session.over is not None  # by another thread, in the meantime
                if not ended:
                    self._connection = self._counted = connection
                    self._sent += broken.bytes_sent
                    self._received += broken.bytes_received
            if ended:
                _abandon(connection)
                self._session.check()
            _log.warning("connected to %s again", self.address)
            _abandon(broken)

    def _carry_out(self, reconnection: Reconnection, why: TransportError) -> Connection:
        """Runs the procedure; returns the connection that replaces the one that `why` broke."""
        candidate: Connection | None = None
        answer: bytes | None = None
        failure: TransportError | None = None
        logged = False
        try:
            while True:
                try:
                    effect = reconnection.send(answer) if failure is None else reconnection.throw(failure)
                except StopIteration:
                    assert candidate is not None
                    return candidate
                if not logged:  # not before: if the server has ended the session, the procedure raises that
                    logged = True
                    _log.warning(
                        "the connection to %s broke: %s. It is tried again, for %g s at most",
                        *(self.address, why, self._patience_s),
                    )
                answer = failure = None
                try:
                    match effect:
                        case Dial(within_s, opening):
                            _abandon(candidate)
                            candidate = self._dial(within_s)
                            candidate.send(opening)
                            answer = candidate.receive(within_s)
                        case Repeat(packets):
                            assert candidate is not None
                            for packet in packets:
                                candidate.send(packet)
                        case Pause(seconds):
                            time.sleep(seconds)
                except TransportError as error:
                    failure = error
        except BaseException:
            _abandon(candidate)
            raise

    def _dial(self, within_s: float) -> Connection:
        try:
            return self._connect(within_s)
        except ConfigError as error:  # the options were valid before: a token file may be absent for a moment
            raise TransportError(str(error)) from error


def _arrived(broken: Connection) -> list[bytes | None]:
    """Returns the packets that a broken connection received before it broke."""
    found: list[bytes | None] = []
    with contextlib.suppress(TransportError):
        while not found or found[-1] is not None:
            found.append(broken.receive(0))
    return found


def _abandon(connection: Connection | None) -> None:
    if connection is not None:
        with contextlib.suppress(TransportError):
            connection.abort()
