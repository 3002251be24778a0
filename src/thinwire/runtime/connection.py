"""The worker's connection to a server: opened by address, and replaced where it breaks.

To its user it is one connection that is slow at times. After a break another connection is opened, with growing pauses
between the attempts; both ends then repeat what the other has not received, so that every message arrives once, and the
cores are not told. Without a server that waits (`SessionAccepted.grace_s`), a break is the end, at once.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable

from thinwire.errors import ConfigError, DeadlineError, ProtocolError, SessionLostError, TransportError
from thinwire.packets import kind_of, pack, parse
from thinwire.schema import Acknowledged, Leave, Refused, SessionAccepted, SessionOpen
from thinwire.transports import grpc
from thinwire.transports.base import MAX_MESSAGE_NBYTES, Connection, check_packet, wire_nbytes
from thinwire.transports.grpc import GrpcOptions

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 3.0
LEAVING_S = 5.0
"""For how long one that has sent its `Leave` tries to receive the answer."""
ACKNOWLEDGE_MESSAGES = 64
ACKNOWLEDGE_NBYTES = 2**20
"""After so many messages or bytes a receiver acknowledges them, so that the sender may drop its copies."""

SESSION_NBYTES = 16
"""A session's name is a secret of 128 bits: who knows it can speak in the worker's place."""

Connect = Callable[[float], Connection]
"""Opens a connection, waiting so many seconds for the server at most."""


def connect(
    server: str | Connection,
    *,
    connect_timeout_s: float = 30.0,
    reconnect_s: float = 0.0,
    options: GrpcOptions | None = None,
) -> Connection:
    """Returns a connection to `grpc://host:port`, waiting until the server is there; a Connection is taken as it is.

    Args:
        server: the address, or a connection.
        connect_timeout_s: how long the server may take to appear, in seconds.
        reconnect_s: for how long a connection that breaks is tried to be replaced, in seconds; 0: not at all.
        options: of the transport.

    Raises:
        ConfigError: an address of another form.
        DeadlineError: nobody answers at that address.
    """
    if isinstance(server, Connection):
        return server
    scheme, _, address = server.partition("://")
    if scheme != "grpc" or not address:
        raise ConfigError(f"server={server!r}; expected grpc://host:port")

    def dial(timeout_s: float) -> Connection:
        return grpc.connect(address, connect_timeout_s=timeout_s, options=options)

    if reconnect_s <= 0:
        return dial(connect_timeout_s)
    return ReconnectingConnection(
        dial,
        connect_timeout_s=connect_timeout_s,
        reconnect_s=reconnect_s,
        max_message_nbytes=(options or GrpcOptions()).max_message_nbytes,
    )


class ReplayBuffer:
    """One end of a session: what it sent and may have to send again, and how much it received.

    Messages are counted, not numbered: they keep their order, so a count says which.

    Attributes:
        received: messages that came from the other end.
        acknowledged: messages of this end that the other is known to have.
        nbytes: size of the messages kept.

    Example:
        >>> buffer = ReplayBuffer()
        >>> for packet in (b"1", b"2", b"3"):
        ...     buffer.append(packet)
        >>> buffer.acknowledge(2)
        >>> buffer.unacknowledged
        (b'3',)
    """

    def __init__(self) -> None:
        self.received = self.acknowledged = self.nbytes = 0
        self._sent: deque[bytes] = deque()
        self._due_messages = self._due_nbytes = 0

    def append(self, packet: bytes) -> None:
        """Keeps a message that is sent."""
        self._sent.append(packet)
        self.nbytes += wire_nbytes(packet)

    def record(self, packet: bytes) -> bool:
        """Counts a message that came; returns whether it is time to acknowledge."""
        self.received += 1
        self._due_messages += 1
        self._due_nbytes += len(packet)
        if self._due_messages < ACKNOWLEDGE_MESSAGES and self._due_nbytes < ACKNOWLEDGE_NBYTES:
            return False
        self._due_messages = self._due_nbytes = 0
        return True

    def acknowledge(self, count: int) -> None:
        """Drops what the other end has: `count` messages since the session began.

        Raises:
            ProtocolError: fewer than it acknowledged before, or more than there were.
        """
        most = self.acknowledged + len(self._sent)
        if not self.acknowledged <= count <= most:
            raise ProtocolError(
                f"the other end acknowledges {count} messages; between {self.acknowledged} and {most} are possible"
            )
        while self.acknowledged < count:
            self.nbytes -= wire_nbytes(self._sent.popleft())
            self.acknowledged += 1

    @property
    def unacknowledged(self) -> tuple[bytes, ...]:
        """What the other end may not have, in order."""
        return tuple(self._sent)


class ReconnectingConnection(Connection):
    """A connection that is replaced where it breaks.

    Args:
        connect: opens a connection to the server, always the same one.
        connect_timeout_s: how long the server may take to appear at first, in seconds.
        reconnect_s: for how long a broken connection is tried to be replaced, in seconds.
        max_message_nbytes: largest packet that the transport takes.

    Raises:
        DeadlineError: nobody answers.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        connect_timeout_s: float,
        reconnect_s: float,
        max_message_nbytes: int = MAX_MESSAGE_NBYTES,
    ) -> None:
        self._connect, self._reconnect_s, self._max_message_nbytes = connect, reconnect_s, max_message_nbytes
        self._session = secrets.token_hex(SESSION_NBYTES)
        # Held while a packet is sent, so that packets leave in the order in which they are kept, and while the
        # connection is replaced.
        self._sending = threading.RLock()
        # Held for moments only: the buffer, and whose packets count.
        self._counting = threading.Lock()
        self._buffer = ReplayBuffer()
        self._server_waits = True  # until the server says otherwise
        self._left = False
        self._over: str | None = None
        self.reconnections = 0
        """How often a connection was replaced."""
        self._connection = connect(connect_timeout_s)
        self._counted: Connection | None = self._connection
        """The connection whose packets count; None while another is sought, on which the server repeats them."""
        self.address = self._connection.address
        self._sent = self._received = 0
        self._connection.send(self._opening())

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
            self._check()
            self._left = self._left or kind_of(packet) is Leave
            with self._counting:
                if self._server_waits:
                    self._buffer.append(packet)
            try:
                self._connection.send(packet)
            except TransportError as error:
                self._replace(self._connection, error)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._check()
            connection = self._connection
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                packet = connection.receive(left)
            except DeadlineError:
                raise
            except TransportError as error:
                self._replace(connection, error)
                continue
            if packet is None or (kind := kind_of(packet)) is Refused:
                return packet
            message = parse(packet)[0] if kind is SessionAccepted or kind is Acknowledged else None
            with self._counting:
                if connection is not self._counted:
                    continue  # another thread is replacing it, or has: the server repeats this packet
                if isinstance(message, Acknowledged):
                    self._buffer.acknowledge(message.count)
                elif isinstance(message, SessionAccepted) and message.grace_s <= 0:
                    self._server_waits, self._buffer = False, ReplayBuffer()
                due = message is None and self._buffer.record(packet) and self._server_waits
                received = self._buffer.received
            if due:
                with contextlib.suppress(TransportError):  # noticed by whoever sends or receives next
                    connection.send(pack(Acknowledged(count=received)))
            if message is None:
                return packet

    def close(self, timeout_s: float = 30.0) -> None:
        self._over = self._over or f"this end has closed the session with {self.address}"
        self._connection.close(timeout_s)

    def abort(self) -> None:
        self._over = self._over or f"this end has closed the session with {self.address}"
        self._connection.abort()

    def _check(self) -> None:
        if self._over is not None:
            raise TransportError(self._over)

    def _opening(self) -> bytes:
        with self._counting:
            received, acknowledged = self._buffer.received, self._buffer.acknowledged
        return pack(SessionOpen(session=self._session, received=received, acknowledged=acknowledged))

    def _replace(self, broken: Connection, error: TransportError) -> None:
        """Replaces a broken connection, unless another thread has done so. Raises what broke it where it cannot."""
        with self._sending:
            if self._connection is not broken:
                return
            self._check()
            if not self._server_waits:
                raise error
            with self._counting:
                self._counted = None
            self._look_for_refusal(broken, error)
            patience = min(self._reconnect_s, LEAVING_S) if self._left else self._reconnect_s
            deadline, pause, last = time.monotonic() + patience, FIRST_PAUSE_S, str(error)
            while (left := deadline - time.monotonic()) > 0:
                try:
                    self._resume(left)
                    return
                except TransportError as failed:
                    last = str(failed)
                except ProtocolError as refused:
                    self._over = str(refused)
                    raise
                time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
                pause = min(2 * pause, LONGEST_PAUSE_S)
            self._over = f"{error}; no way back to {self.address} within {patience:g} s: {last}"
            raise TransportError(self._over) from error

    def _look_for_refusal(self, broken: Connection, error: TransportError) -> None:
        """Raises the server's reason where it has ended the session. Anything else that came will be repeated."""
        with contextlib.suppress(TransportError):
            while (packet := broken.receive(0)) is not None:
                if kind_of(packet) is Refused:
                    message, _ = parse(packet)
                    assert isinstance(message, Refused)
                    self._over = f"the server ended the session: {message.reason}"
                    raise ProtocolError(self._over)
            self._over = str(error)
        if self._over is not None:
            raise error

    def _resume(self, left: float) -> None:
        """Opens another connection, within `left` seconds, and repeats what the server has not received."""
        connection = self._connect(left)
        try:
            connection.send(self._opening())
            packet = connection.receive(left)
            message = None if packet is None else parse(packet)[0]
            if isinstance(message, Refused):
                kind = SessionLostError if message.lost else ProtocolError
                raise kind(f"the server ended the session: {message.reason}")
            if not isinstance(message, SessionAccepted):
                raise TransportError(f"{self.address} did not take the session up again")
            with self._counting:
                self._buffer.acknowledge(message.received)
                unacknowledged = self._buffer.unacknowledged
            for sent in unacknowledged:
                connection.send(sent)
        except BaseException:
            with contextlib.suppress(TransportError):
                connection.abort()
            raise
        self._sent += self._connection.bytes_sent
        self._received += self._connection.bytes_received
        with contextlib.suppress(TransportError):
            self._connection.abort()
        with self._counting:
            self._connection = self._counted = connection
        self.reconnections += 1
