"""The contract of every transport: packets in order between one server and its peers, and nothing more.

A worker holds a `Connection`; a server offers a `Handler` and is given a `Sender`. A packet is bytes, at least one,
which a transport does not read. The packets of one session arrive whole, once and in order, or the session breaks and
says so; a transport never reconnects, because only its caller knows what to send again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from thinwire.errors import ConfigError, TransportError

# Room for one fp32 table of 134 million values; a larger one wants partitions, which also overlap better.
MAX_MESSAGE_NBYTES = 512 * 2**20
MAX_PACKET_NBYTES = 2**31 - 1  # no options allow more
# Beside one packet of any size. A peer that cannot take what waits for it must not fill our memory.
MAX_PENDING_NBYTES = 256 * 2**20
HTTP2_FRAME_NBYTES = 16_384  # payload of one DATA frame, HTTP/2's default SETTINGS_MAX_FRAME_SIZE
HTTP2_FRAME_HEADER_NBYTES = 9
GRPC_PREFIX_NBYTES = 5  # compression flag and message length
CHUNK_NBYTES = 2**20
"""A larger packet travels in several gRPC messages: what a receiver reads before it can refuse."""


def wire_nbytes(packet: bytes) -> int:
    """Returns what a packet takes on an HTTP/2 stream, in bytes.

    With m = its length + 5 (gRPC's prefix), it is m + 9·⌈m / 16384⌉: nine bytes of header for each DATA frame. Each
    whole MiB of a packet is a message of its own, and counts so. TCP, IP and TLS overhead, acknowledgements and
    keepalive pings are not in it. Every transport counts by this formula, so that their figures compare.

    >>> wire_nbytes(b"x"), wire_nbytes(bytes(16_379)), wire_nbytes(bytes(16_380))
    (15, 16393, 16403)
    """
    chunks, rest = divmod(len(packet), CHUNK_NBYTES)
    return chunks * message_wire_nbytes(CHUNK_NBYTES) + message_wire_nbytes(rest)


def message_wire_nbytes(nbytes: int) -> int:
    """Returns what one gRPC message of so many bytes takes on an HTTP/2 stream."""
    nbytes += GRPC_PREFIX_NBYTES
    return nbytes + HTTP2_FRAME_HEADER_NBYTES * -(-nbytes // HTTP2_FRAME_NBYTES)


def check_packet(packet: bytes, limit_nbytes: int) -> None:
    """Raises `TransportError` where a packet is larger than `limit_nbytes` bytes, `ConfigError` where it is empty."""
    if not packet:
        raise ConfigError("an empty packet cannot be sent: on a gRPC stream it is the worker's goodbye")
    if len(packet) > limit_nbytes:
        raise TransportError(
            f"a packet of {len(packet)} bytes is over the message limit of {limit_nbytes} bytes; send fewer frames in "
            f"it or raise max_message_nbytes on both sides"
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """What a peer has proved of itself before its first message: a certificate's name, and the rank that it is for."""

    name: str = ""
    """Empty without a certificate."""
    rank: int | None = None
    """None where its certificate or token is for any rank."""


ANYBODY = Identity()
"""A peer that need not prove anything."""


class Connection(ABC):
    """The worker's end of one session with one server. It blocks; `send` may be called by any thread.

    An error is latched: once a call raised `TransportError` because the session broke, every later `send` and
    `receive` raises it again.

    Attributes:
        address: the server's, for messages to people.
        bytes_sent: sum of `wire_nbytes` over the packets handed to the wire.
        bytes_received: sum of `wire_nbytes` over the packets that arrived.
    """

    address: str
    bytes_sent: int = 0
    bytes_received: int = 0

    @abstractmethod
    def send(self, packet: bytes) -> None:
        """Queues a packet; blocks only while too many bytes are pending.

        Raises:
            TransportError: the packet is over the message limit (the session lives on), or the session has ended.
        """

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Returns the next packet, or None when the server has ended the session in good order.

        Args:
            timeout_s: how long to wait, in seconds; None waits for ever, 0 only looks.

        Raises:
            DeadlineError: nothing came in time; the session lives on.
            TransportError: the session broke, or this end has closed it.
        """

    @abstractmethod
    def close(self, timeout_s: float = 30.0) -> None:
        """Ends the session: what was sent before still reaches the server, what was not received is dropped.

        Closing twice, or after the session broke, does nothing.

        Raises:
            DeadlineError: the server did not confirm within `timeout_s` seconds; what was sent last may be lost.
        """

    @abstractmethod
    def abort(self) -> None:
        """Breaks the session as a crash of this process would; the handler is told an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A worker that leaves through an exception has crashed, and the server should hear so.
        if error is None:
            self.close()
        else:
            self.abort()


class Handler(Protocol):
    """What a server offers. Its methods are called one at a time, never concurrently.

    They must not block on other peers' packets: nothing else is delivered meanwhile. An exception that leaves a handler
    is a bug: it stops the server, breaks every session with its text, and `Server.wait` raises it. To turn one peer
    away, answer and end its session with `Sender.close`.
    """

    def opened(self, peer: int) -> None:
        """A session began. Peers are numbered 0, 1, 2, … in the order of arrival; no number returns."""

    def received(self, peer: int, packet: bytes) -> None:
        """A packet came from a peer, after all that it sent before."""

    def closed(self, peer: int, error: str | None) -> None:
        """A session is over, with what broke it, or None where either end ended it in good order; once a session."""


class Sender(ABC):
    """How a handler answers. Every method only queues; none blocks.

    All but `call` belong to the handler: call them from its methods, or through `call`.
    """

    @abstractmethod
    def send(self, peer: int, packet: bytes) -> None:
        """Queues a packet for a peer. A peer that has left is ignored: `closed` tells of it.

        A peer for which too many bytes are pending loses its session, with an error.

        Raises:
            TransportError: the packet is over the message limit.
        """

    @abstractmethod
    def close(self, peer: int, packet: bytes | None = None) -> None:
        """Ends a peer's session in good order, after what is pending and an optional last packet."""

    @abstractmethod
    def call(self, callback: Callable[[], None]) -> None:
        """Runs `callback` between two calls of the handler, soon. Safe from any thread: for timers."""

    @abstractmethod
    def limit(self, peer: int, nbytes: int, exceeded: Callable[[], None], pending_nbytes: int = 0) -> None:
        """Limits a peer's packets to so many bytes, from now on; nothing is read beyond the first byte too many.

        Args:
            peer: its number.
            nbytes: of one packet, at most.
            exceeded: called in place of `received` for a larger one; it is to end the session.
            pending_nbytes: may wait to be sent to the peer, where that is more than before.
        """

    def identity(self, peer: int) -> Identity:
        """Returns what a peer has proved of itself; `ANYBODY` where the transport asks for nothing."""
        return ANYBODY


HandlerFactory = Callable[[Sender], Handler]


class Server(ABC):
    """A running server.

    Attributes:
        address: where it is reached; of port 0, the port that was found.
        bytes_sent: sum of `wire_nbytes` over the packets handed to the wire, all peers together.
        bytes_received: sum of `wire_nbytes` over the packets that arrived.
    """

    address: str
    bytes_sent: int = 0
    bytes_received: int = 0

    @abstractmethod
    def stop(self, grace_s: float = 5.0) -> None:
        """Ends every session and returns when the server is gone. Stopping twice does nothing.

        Not for use inside a handler, which could not be waited for.

        Args:
            grace_s: how long pending packets may take to leave, in seconds. In that time sessions end in good order;
                at 0, and for peers that are too slow, they break as in a crash.
        """

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the server has stopped; returns False if it has not within `timeout_s` seconds.

        Raises:
            Exception: the one that left the handler and stopped the server.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
