"""The worker's connection to a server: opened by address, and replaced where it breaks.

To its user it is one connection that is slow at times. After a break it opens another, with growing pauses between the
attempts; both ends then repeat what the other has not received, so that every message arrives once, and the cores are
not told. Where the server does not wait (`SessionAccepted.grace_s`), a break is the end, at once.
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
"""A session's name is a secret of 128 bits: who knows it can speak in the worker's place."""

Connect = Callable[[float], Connection]
"""Opens a connection, waiting so many seconds for the server at most."""


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
    """Returns a connection to `grpc://host:port`, waiting until the server is there; a Connection is returned as it is.

    Args:
        server: the address, or a connection.
        connect_timeout_s: how long the server may take to appear, in seconds.
        reconnect_s: for how long the connection tries to replace a broken one, in seconds; 0: not at all.
        options: of gRPC.

    Raises:
        ConfigError: an address of another form, or times that cannot be waited for.
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
    """As `connect`, to every shard; where one cannot be reached, the connections that opened are closed.

    A server ends a connection whose worker has not joined in time, and a worker joins once all shards are there: a
    connection to an address that has waited for long when the last one appears is opened anew.
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
    """A connection that is replaced where it breaks.

    Args:
        connect: opens a connection to the server, always the same one.
        connect_timeout_s: how long the server may take to appear at first, in seconds.
        reconnect_s: for how long this end tries to replace a broken connection, in seconds.
        max_message_nbytes: largest packet that the transport takes.

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
        # Held while a packet is sent, so that packets leave in the order in which they are kept, and while the
        # connection is replaced.
        self._sending = threading.RLock()
        # Held for moments only: the session's counts, and whose packets count.
        self._counting = threading.Lock()
        self._connection = connect(connect_timeout_s)
        self._counted: Connection | None = self._connection
        """The connection whose packets count; None while this end seeks another, on which the server repeats them."""
        self.address = self._connection.address
        self._session = WorkerSession(
            secrets.token_hex(SESSION_NBYTES), self.address, reconnect_s=reconnect_s, now=time.monotonic
        )
        self._sent = self._received = 0
        self._connection.send(self._session.opening())

    @property
    def reconnections(self) -> int:
        """How often a connection was replaced."""
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
        """Ends the session, and returns the connection that it leaves; no other takes that one's place any more."""
        with self._counting:
            self._session.over = self._session.over or f"this end has closed the session with {self.address}"
            return self._connection

    def _replace(self, broken: Connection, error: TransportError) -> None:
        """Replaces a broken connection, unless another thread has done so. Raises what broke it where it cannot."""
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
        """Runs the procedure; returns the connection that takes the place of the one that `why` broke."""
        candidate: Connection | None = None
        answer: bytes | None = None
        failure: TransportError | None = None
        told = False
        try:
            while True:
                try:
                    effect = reconnection.send(answer) if failure is None else reconnection.throw(failure)
                except StopIteration:
                    assert candidate is not None
                    return candidate
                if not told:  # not before: where the server has ended the session, that is what the procedure raises
                    told = True
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
        except ConfigError as error:  # all of it was right at first: a token file that is being replaced is back soon
            raise TransportError(str(error)) from error


def _arrived(broken: Connection) -> list[bytes | None]:
    """What a broken connection received before it broke."""
    found: list[bytes | None] = []
    with contextlib.suppress(TransportError):
        while not found or found[-1] is not None:
            found.append(broken.receive(0))
    return found


def _abandon(connection: Connection | None) -> None:
    if connection is not None:
        with contextlib.suppress(TransportError):
            connection.abort()
