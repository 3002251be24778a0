"""The worker's end of a session that outlives its connections: to its user, one connection that takes its time.

A connection that breaks is replaced by another, with growing pauses between the attempts; both ends then repeat what
the other has not heard, so that nothing is lost and nothing comes twice. The cores never learn of it. Without a server
that waits (`Opened.grace_s`), a break is the end, at once.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable

from thinwire.errors import DeadlineError, ProtocolError, TransportError
from thinwire.packets import kind_of, pack, parse
from thinwire.runtime.lane import Lane
from thinwire.schema import Heard, Leave, Open, Opened, Refused
from thinwire.transports.base import MAX_MESSAGE_NBYTES, Connection, check_packet

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 3.0
LEAVING_S = 5.0
"""How long one that has said goodbye tries to hear the answer."""

Connect = Callable[[float], Connection]
"""Opens a connection, waiting so many seconds for the server at most."""


class Reconnecting(Connection):
    """A connection that mends itself.

    Args:
        connect: opens a connection to the server, always the same one.
        connect_timeout_s: how long the server may take to appear at first, in seconds.
        reconnect_s: for how long a broken connection is tried to be replaced, in seconds.
        max_message_nbytes: largest message that the transport takes.

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
        self._session = secrets.token_hex(8)
        self._lane = Lane()
        self._lock = threading.RLock()
        self._lasts = True  # until the server says otherwise
        self._left = False
        self._over: str | None = None
        self.reconnections = 0
        """How often a connection was replaced."""
        self._connection = connect(connect_timeout_s)
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
        with self._lock:
            self._check()
            self._left = self._left or kind_of(packet) is Leave
            if self._lasts:
                self._lane.say(packet)
            try:
                self._connection.send(packet)
            except TransportError as error:
                self._mend(self._connection, error)

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
                self._mend(connection, error)
                continue
            if packet is None:
                return None
            message = self._ours(packet)
            if isinstance(message, Opened):
                self._lasts = message.grace_s > 0
                if not self._lasts:
                    self._lane = Lane()
            elif isinstance(message, Heard):
                with self._lock:
                    self._lane.acknowledge(message.count)
            else:
                if kind_of(packet) is not Refused and self._lane.hear(packet) and self._lasts:
                    with contextlib.suppress(TransportError):  # noticed by whoever sends or receives next
                        connection.send(pack(Heard(count=self._lane.heard)))
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
        return pack(Open(session=self._session, heard=self._lane.heard, forgotten=self._lane.forgotten))

    def _ours(self, packet: bytes) -> Opened | Heard | None:
        """The message of a packet that is about the session itself."""
        if kind_of(packet) not in (Opened, Heard):
            return None
        message, _ = parse(packet)
        assert isinstance(message, Opened | Heard)
        return message

    def _mend(self, broken: Connection, error: TransportError) -> None:
        """Replaces a broken connection, unless another thread has done so. Raises what broke it where it cannot."""
        with self._lock:
            if self._connection is not broken:
                return
            self._check()
            if not self._lasts:
                raise error
            self._hear_last_words(broken, error)
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

    def _hear_last_words(self, broken: Connection, error: TransportError) -> None:
        """A server that ended the session said so: nobody is there to go back to. Anything else will be repeated."""
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
        connection = self._connect(left)
        try:
            connection.send(self._opening())
            packet = connection.receive(left)
            message = None if packet is None else parse(packet)[0]
            if packet is None or not isinstance(message, Opened | Refused):
                raise TransportError(f"{self.address} did not take the session up again")
            if isinstance(message, Refused):
                raise ProtocolError(f"the server ended the session: {message.reason}")
            self._lane.acknowledge(message.heard)
            for kept in self._lane.unheard:
                connection.send(kept)
        except BaseException:
            with contextlib.suppress(TransportError):
                connection.abort()
            raise
        self._sent += self._connection.bytes_sent
        self._received += self._connection.bytes_received
        with contextlib.suppress(TransportError):
            self._connection.abort()
        self._connection = connection
        self.reconnections += 1
