"""A session that outlives its connections, without IO: each end's unacknowledged packets, and a worker's reconnection.

`ReplayBuffer` counts the messages that one end sent and received. `WorkerSession` is the worker's end; when a
connection breaks, its procedure `reconnect` yields effects on connections, and receives their results. The caller has
the sockets, threads and clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from thinwire.errors import ProtocolError, TransportError
from thinwire.packets import kind_of, pack, parse
from thinwire.schema import Acknowledged, Leave, Refused, SessionAccepted, SessionOpen
from thinwire.transports.base import wire_nbytes
from thinwire.worker.conversation import refusal

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 3.0
LEAVING_S = 5.0
"""How long a worker that has sent its `Leave` tries to receive the answer."""
ACKNOWLEDGE_MESSAGES, ACKNOWLEDGE_NBYTES = 64, 2**20
"""A receiver acknowledges after this many messages or bytes, so that the sender may drop its copies."""


@dataclass(frozen=True, slots=True)
class Dial:
    """Open another connection, the candidate, send the opening, and return the first packet, within `within_s` seconds.

    An earlier candidate is abandoned. The answer is None if the server closed the candidate without an error.
    """

    within_s: float
    opening: bytes


@dataclass(frozen=True, slots=True)
class Repeat:
    """Send these packets on the candidate."""

    packets: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for `seconds`."""

    seconds: float


Effect: TypeAlias = Dial | Repeat | Pause
"""A request of `reconnect`. If the caller cannot do it, it throws TransportError into the procedure."""
Reconnection: TypeAlias = Generator[Effect, bytes | None, None]


class ReplayBuffer:
    """One end of a session: the messages that it may have to send again, and the number that it received.

    Messages are counted, not numbered: they keep their order, so a count identifies them.

    Attributes:
        received: messages received from the other end.
        acknowledged: messages of this end that the other end has acknowledged.
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
        """Counts a received message; returns whether an acknowledgement is due."""
        self.received += 1
        self._due_messages += 1
        self._due_nbytes += len(packet)
        due = self._due_messages >= ACKNOWLEDGE_MESSAGES or self._due_nbytes >= ACKNOWLEDGE_NBYTES
        if due:
            self._due_messages = self._due_nbytes = 0
        return due

    def acknowledge(self, count: int) -> None:
        """Drops messages that the other end has: the first `count` since the session began.

        Raises:
            ProtocolError: fewer than it acknowledged before, or more than were sent.
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
        """The messages that the other end has not acknowledged, in order."""
        return tuple(self._sent)


class WorkerSession:
    """The worker's end of one session with one server.

    Args:
        name: identifies the session to the server.
        address: of the server, for error messages.
        reconnect_s: how long the worker tries to replace a broken connection, in seconds.
        now: returns a time in seconds.

    Attributes:
        buffer: the messages sent and received.
        server_waits: whether the server keeps the session when a connection breaks; true until the server denies it.
        over: the reason why the session has ended; None until then.
        reconnections: number of replaced connections.
    """

    def __init__(self, name: str, address: str, *, reconnect_s: float, now: Callable[[], float]) -> None:
        self.buffer = ReplayBuffer()
        self.server_waits = True
        self.over: str | None = None
        self.reconnections = self._num_opened = 0
        self._name, self._address, self._reconnect_s, self._now = name, address, reconnect_s, now
        self._left = False

    def check(self) -> None:
        """Raises TransportError if the session has ended."""
        if self.over is not None:
            raise TransportError(self.over)

    def opening(self) -> bytes:
        """Returns the first packet of the next connection."""
        self._num_opened += 1
        return pack(
            SessionOpen(
                session=self._name,
                received=self.buffer.received,
                acknowledged=self.buffer.acknowledged,
                connection=self._num_opened - 1,
            )
        )

    def send(self, packet: bytes) -> None:
        """Records a packet that is about to be sent."""
        self._left = self._left or kind_of(packet) is Leave
        if self.server_waits:
            self.buffer.append(packet)

    def receive(self, packet: bytes) -> tuple[bool, bytes | None]:
        """Records a received packet; returns whether it belongs to the worker, and the packet to answer at once.

        Raises:
            ProtocolError: an invalid packet about the session.
        """
        kind = kind_of(packet)
        if kind is Refused:
            return True, None
        if kind is SessionAccepted or kind is Acknowledged:
            message = parse(packet)[0]
            if isinstance(message, Acknowledged):
                self.buffer.acknowledge(message.count)
            elif isinstance(message, SessionAccepted) and message.grace_s <= 0:
                self.server_waits, self.buffer = False, ReplayBuffer()
            return False, None
        due = self.buffer.record(packet) and self.server_waits
        return True, pack(Acknowledged(count=self.buffer.received)) if due else None

    def reconnect(self, error: TransportError, arrived: Callable[[], Sequence[bytes | None]] = tuple) -> Reconnection:
        """Returns the procedure that replaces a broken connection; once it ends, the candidate is the connection.

        Args:
            error: broke the connection.
            arrived: returns the packets that the connection had received; None is last if the server closed it. The
                server repeats them all.

        Raises:
            ProtocolError: raised by the procedure: the server refuses to continue this session.
            TransportError: the session has ended, or the server does not wait; raised by the procedure: the server was
                not reached.
        """
        self.check()
        if not self.server_waits:
            raise error
        return self._reconnect(error, arrived)

    def _raise_ended(self, error: TransportError, arrived: Sequence[bytes | None]) -> None:
        """Raises the server's reason if it has ended the session."""
        for packet in arrived:
            if packet is None:
                self.over = str(error)
                raise error
            message = parse(packet)[0] if kind_of(packet) is Refused else None
            if isinstance(message, Refused):
                refused = refusal(message)
                self.over = str(refused)
                raise refused

    def _reconnect(self, error: TransportError, arrived: Callable[[], Sequence[bytes | None]]) -> Reconnection:
        self._raise_ended(error, arrived())
        patience = min(self._reconnect_s, LEAVING_S) if self._left else self._reconnect_s
        deadline, pause, last = self._now() + patience, FIRST_PAUSE_S, str(error)
        while (left := deadline - self._now()) > 0:
            self.check()  # another thread may have ended the session
            try:
                yield from self._resume(left)
            except TransportError as failed:
                last = str(failed)
            except ProtocolError as refused:
                self.over = str(refused)
                raise
            else:
                self.reconnections += 1
                return
            yield Pause(min(pause, max(0.0, deadline - self._now())))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        self.over = f"{error}; no way back to {self._address} within {patience:g} s: {last}"
        raise TransportError(self.over) from error

    def _resume(self, left: float) -> Reconnection:
        """Opens another connection, within `left` seconds, and repeats the packets that the server has not received."""
        packet = yield Dial(left, self.opening())
        message = None if packet is None else parse(packet)[0]
        if isinstance(message, Refused):
            raise refusal(message)
        if not isinstance(message, SessionAccepted):
            raise TransportError(f"{self._address} did not resume the session")
        self.buffer.acknowledge(message.received)
        yield Repeat(self.buffer.unacknowledged)
