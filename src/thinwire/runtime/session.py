"""A session that outlives its connections: what each end keeps to send again, and how a worker comes back. Sans-IO.

`ReplayBuffer` is one end's count of what was sent and received. `WorkerSession` is the worker's end: what goes out,
what of that which comes in is for the worker, and, where a connection breaks, `reconnect`: a procedure that yields what
is to be done with connections and is told what came of it. Sockets, threads and clocks are for whoever runs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from thinwire.errors import ProtocolError, SessionLostError, TransportError
from thinwire.packets import kind_of, pack, parse
from thinwire.schema import Acknowledged, Leave, Refused, SessionAccepted, SessionOpen
from thinwire.transports.base import wire_nbytes

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 3.0
LEAVING_S = 5.0
"""For how long one that has sent its `Leave` tries to receive the answer."""
ACKNOWLEDGE_MESSAGES = 64
ACKNOWLEDGE_NBYTES = 2**20
"""After so many messages or bytes a receiver acknowledges them, so that the sender may drop its copies."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Return the next packet that the broken connection received before it broke, without waiting."""


@dataclass(frozen=True, slots=True)
class Dial:
    """Open another connection, the candidate; raise TransportError where nobody answers.

    Args:
        within_s: how long the server may take.
    """

    within_s: float


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send a packet on the candidate."""

    packet: bytes


@dataclass(frozen=True, slots=True)
class Await:
    """Return the candidate's next packet; None where the server ended it in good order.

    Args:
        within_s: how long it may take.
    """

    within_s: float


@dataclass(frozen=True, slots=True)
class Abandon:
    """Break the candidate, if there is one."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for a while.

    Args:
        seconds: how long.
    """

    seconds: float


Effect: TypeAlias = Drain | Dial | Transmit | Await | Abandon | Pause
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


class WorkerSession:
    """The worker's end of one session with one server.

    Args:
        name: by which the server knows the session again.
        address: the server's, for messages to people.
        reconnect_s: for how long a broken connection is tried to be replaced, in seconds.
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
        received, acknowledged = self.buffer.received, self.buffer.acknowledged
        connection, self._num_opened = self._num_opened, self._num_opened + 1
        return pack(
            SessionOpen(session=self._name, received=received, acknowledged=acknowledged, connection=connection)
        )

    def send(self, packet: bytes) -> None:
        """Notes a packet that is about to be sent."""
        self._left = self._left or kind_of(packet) is Leave
        if self.server_waits:
            self.buffer.append(packet)

    def receive(self, packet: bytes) -> tuple[bool, bytes | None]:
        """Takes a packet of the connection that counts.

        Returns:
            Whether it is the worker's, and what to answer at once.

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

    def reconnect(self, error: TransportError) -> Reconnection:
        """Returns the procedure that replaces a connection which `error` broke: once it returns, the candidate counts.

        Raises:
            ProtocolError: by the procedure: the server refuses to go on with this session.
            TransportError: the session is over, or the server does not wait; by the procedure: it was not reached.
        """
        self.check()
        if not self.server_waits:
            raise error
        return self._reconnect(error)

    def _reconnect(self, error: TransportError) -> Reconnection:
        yield from self._look_for_refusal(error)
        patience = min(self._reconnect_s, LEAVING_S) if self._left else self._reconnect_s
        deadline, pause, last = self._now() + patience, FIRST_PAUSE_S, str(error)
        while (left := deadline - self._now()) > 0:
            self.check()  # another thread may have ended the session
            try:
                yield from self._resume(left)
            except TransportError as failed:
                last = str(failed)
                yield Abandon()
            except ProtocolError as refused:
                self.over = str(refused)
                yield Abandon()
                raise
            else:
                self.reconnections += 1
                return
            yield Pause(min(pause, max(0.0, deadline - self._now())))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        self.over = f"{error}; no way back to {self._address} within {patience:g} s: {last}"
        raise TransportError(self.over) from error

    def _look_for_refusal(self, error: TransportError) -> Reconnection:
        """Raises the server's reason where it has ended the session. Anything else that came will be repeated."""
        with suppress(TransportError):
            while (packet := (yield Drain())) is not None:
                if kind_of(packet) is Refused:
                    message, _ = parse(packet)
                    assert isinstance(message, Refused)
                    refusal = _refusal(message)
                    self.over = str(refusal)
                    raise refusal
            self.over = str(error)
        if self.over is not None:
            raise error

    def _resume(self, left: float) -> Reconnection:
        """Opens another connection, within `left` seconds, and repeats what the server has not received."""
        yield Dial(left)
        yield Transmit(self.opening())
        packet = yield Await(left)
        message = None if packet is None else parse(packet)[0]
        if isinstance(message, Refused):
            raise _refusal(message)
        if not isinstance(message, SessionAccepted):
            raise TransportError(f"{self._address} did not take the session up again")
        self.buffer.acknowledge(message.received)
        for sent in self.buffer.unacknowledged:
            yield Transmit(sent)


def _refusal(message: Refused) -> ProtocolError:
    """What a server's last message means to its worker, as where the conversation hears it."""
    reason = f"the server ended the session: {message.reason}"
    return (SessionLostError if message.lost else ProtocolError)(reason)
