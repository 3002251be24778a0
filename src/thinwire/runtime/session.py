"""A session that outlives its connections: what each end keeps to send again, and how a worker comes back. Sans-IO.

`ReplayBuffer` counts the messages that one end sent and received. `WorkerSession` is the worker's end; where a
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
"""For how long a worker that has sent its `Leave` tries to receive the answer."""
ACKNOWLEDGE_MESSAGES, ACKNOWLEDGE_NBYTES = 64, 2**20
"""After so many messages or bytes a receiver acknowledges them, so that the sender may drop its copies."""


@dataclass(frozen=True, slots=True)
class Dial:
    """Open another connection, the candidate, send its opening, and return its first packet, within so many seconds.

    A candidate before it is given up. The answer is None where the server ended this one in good order.
    """

    within_s: float
    opening: bytes


@dataclass(frozen=True, slots=True)
class Repeat:
    """Send these packets on the candidate."""

    packets: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for so many seconds."""

    seconds: float


Effect: TypeAlias = Dial | Repeat | Pause
"""What `reconnect` wants done. Where it cannot be, TransportError is thrown into the procedure."""
Reconnection: TypeAlias = Generator[Effect, bytes | None, None]


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
        due = self._due_messages >= ACKNOWLEDGE_MESSAGES or self._due_nbytes >= ACKNOWLEDGE_NBYTES
        if due:
            self._due_messages = self._due_nbytes = 0
        return due

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


class WorkerSession:
    """The worker's end of one session with one server.

    Args:
        name: by which the server knows the session again.
        address: the server's, for messages to people.
        reconnect_s: for how long the worker tries to replace a broken connection, in seconds.
        now: returns a time in seconds.

    Attributes:
        buffer: what was sent and received.
        server_waits: whether the server keeps the session where a connection breaks; it does until it says otherwise.
        over: why nothing can be sent or received any more; None while it can.
        reconnections: how often a connection was replaced.
    """

    def __init__(self, name: str, address: str, *, reconnect_s: float, now: Callable[[], float]) -> None:
        self.buffer = ReplayBuffer()
        self.server_waits = True
        self.over: str | None = None
        self.reconnections = self._num_opened = 0
        self._name, self._address, self._reconnect_s, self._now = name, address, reconnect_s, now
        self._left = False

    def check(self) -> None:
        """Raises TransportError where the session is over."""
        if self.over is not None:
            raise TransportError(self.over)

    def opening(self) -> bytes:
        """The first packet of every connection."""
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
        """Notes a packet that is about to be sent."""
        self._left = self._left or kind_of(packet) is Leave
        if self.server_waits:
            self.buffer.append(packet)

    def receive(self, packet: bytes) -> tuple[bool, bytes | None]:
        """Notes a packet that came; returns whether it belongs to the worker, and what to answer at once.

        Raises:
            ProtocolError: a packet about the session that cannot be.
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
        """Returns the procedure that replaces a connection which `error` broke: once it returns, the candidate counts.

        Args:
            error: what broke the connection.
            arrived: takes from that connection what it had received; None comes last where the server ended it. The
                server repeats all that it returns.

        Raises:
            ProtocolError: by the procedure: the server refuses to go on with this session.
            TransportError: the session is over, or the server does not wait; by the procedure: it was not reached.
        """
        self.check()
        if not self.server_waits:
            raise error
        return self._reconnect(error, arrived)

    def _look_for_end(self, error: TransportError, arrived: Sequence[bytes | None]) -> None:
        """Raises the server's reason where it has ended the session."""
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
        self._look_for_end(error, arrived())
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
        """Opens another connection, within `left` seconds, and repeats what the server has not received."""
        packet = yield Dial(left, self.opening())
        message = None if packet is None else parse(packet)[0]
        if isinstance(message, Refused):
            raise refusal(message)
        if not isinstance(message, SessionAccepted):
            raise TransportError(f"{self._address} did not take the session up again")
        self.buffer.acknowledge(message.received)
        yield Repeat(self.buffer.unacknowledged)
