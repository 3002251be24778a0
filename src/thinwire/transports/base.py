"""The interface of every transport: packets in order between one server and its peers.

A worker holds a `Connection`; a server implements a `Handler` and uses a `Sender`. A packet is one or more bytes, which
a transport does not interpret. The packets of one session arrive whole, once and in order, or the session breaks with
an error; a transport never reconnects, because only its caller knows which packets to repeat.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from thinwire.errors import ConfigError, TransportError

# Room for one fp32 table of 134 million values; a larger one needs partitions, which also overlap better.
MAX_MESSAGE_NBYTES = 512 * 2**20
MAX_PACKET_NBYTES = 2**31 - 1  # no options allow more
# In addition to one packet of any size. A peer that does not read must not fill our memory.
MAX_PENDING_NBYTES = 256 * 2**20
HTTP2_FRAME_NBYTES = 16_384  # payload of one DATA frame, HTTP/2's default SETTINGS_MAX_FRAME_SIZE
HTTP2_FRAME_HEADER_NBYTES = 9
GRPC_PREFIX_NBYTES = 5  # compression flag and message length
CHUNK_NBYTES = 2**20
"""Bytes that a receiver reads before it can refuse: a larger packet is sent as several gRPC messages."""


def wire_nbytes(packet: bytes) -> int:
    """Returns the size of a packet on an HTTP/2 stream, in bytes.

    With m = its length + 5 (gRPC's prefix), it is m + 9·⌈m / 16384⌉: nine bytes of header for each DATA frame. Each
    whole MiB of a packet counts as a separate message. The size excludes TCP, IP and TLS overhead, acknowledgements and
    keepalive pings. Every transport uses this formula, so that their figures are comparable.

    >>> wire_nbytes(b"x"), wire_nbytes(bytes(16_379)), wire_nbytes(bytes(16_380))
    (15, 16393, 16403)
    """
    chunks, rest = divmod(len(packet), CHUNK_NBYTES)
    return chunks * message_wire_nbytes(CHUNK_NBYTES) + message_wire_nbytes(rest)


def message_wire_nbytes(nbytes: int) -> int:
    """Returns the size of one gRPC message of `nbytes` bytes on an HTTP/2 stream."""
    nbytes += GRPC_PREFIX_NBYTES
    return nbytes + HTTP2_FRAME_HEADER_NBYTES * -(-nbytes // HTTP2_FRAME_NBYTES)


def check_packet(packet: bytes, limit_nbytes: int) -> None:
    """Raises `TransportError` where a packet is larger than `limit_nbytes` bytes, `ConfigError` where it is empty."""
    if not packet:
        raise ConfigError("an empty packet cannot be sent: on a gRPC stream it ends the worker's session")
    if len(packet) > limit_nbytes:
        raise TransportError(
            f"a packet of {len(packet)} bytes is over the message limit of {limit_nbytes} bytes; send fewer frames in "
            f"it or raise max_message_nbytes on both sides"
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """A peer's identity, proved before its first message: a certificate's name, and its rank."""

    name: str = ""
    """The certificate's name; empty without a certificate."""
    rank: int | None = None
    """The rank of its certificate or token; None where both are for any rank."""


UNAUTHENTICATED = Identity()
"""The identity of a peer that the transport does not authenticate."""


class Connection(ABC):
    """The worker's end of one session with one server. Calls block; any thread may call `send`.

    An error is latched: once a call raised `TransportError` because the session broke, every later `send` and
    `receive` raises it again.

    Attributes:
        address: the server's, for messages to people.
        bytes_sent: sum of `wire_nbytes` over the packets sent.
        bytes_received: sum of `wire_nbytes` over the packets received.
    """

    address: str
    bytes_sent: int = 0
    bytes_received: int = 0

    @abstractmethod
    def send(self, packet: bytes) -> None:
        """Queues a packet; blocks only while too many bytes are pending.

        Raises:
            TransportError: the packet is over the message limit (the session continues), or the session has ended.
        """

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Returns the next packet, or None when the server has ended the session without error.

        Args:
            timeout_s: longest wait, in seconds; None waits without limit, 0 does not wait.

        Raises:
            DeadlineError: no packet came in time; the session continues.
            TransportError: the session broke, or this end has closed it.
        """

    @abstractmethod
    def close(self, timeout_s: float = 30.0) -> None:
        """Ends the session: packets already sent reach the server, packets not yet received are dropped.

        Closing twice, or after the session broke, has no effect.

        Raises:
            DeadlineError: the server did not confirm within `timeout_s` seconds; the last packets may be lost.
        """

    @abstractmethod
    def abort(self) -> None:
        """Breaks the session as a crash of this process would; the handler gets an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A worker that leaves through an exception has crashed, and the server must get an error.
        if error is None:
            self.close()
        else:
            self.abort()


class Handler(Protocol):
    """A server's callbacks. A transport calls them one at a time, never concurrently.

    They must not block on other peers' packets: the transport delivers no packet during a call. An exception that
    leaves a handler is a bug: it stops the server, breaks every session with its text, and `Server.wait` raises it. To
    refuse one peer, answer and end its session with `Sender.close`.
    """

    def opened(self, peer: int) -> None:
        """Called when a session begins. Peers are numbered 0, 1, 2, … in the order of arrival; no number is reused."""

    def received(self, peer: int, packet: bytes) -> None:
        """Called for each packet of a peer, in the order of sending."""

    def closed(self, peer: int, error: str | None) -> None:
        """Called once when a session is over: with the error that broke it, or None where either end closed it."""


class Sender(ABC):
    """A handler's way to answer. Every method queues its work and returns at once.

    All methods except `call` are for the handler: call them from its methods, or through `call`.
    """

    @abstractmethod
    def send(self, peer: int, packet: bytes) -> None:
        """Queues a packet for a peer. A peer that has left is ignored: `closed` reports it.

        The session of a peer with too many pending bytes ends with an error.

        Raises:
            TransportError: the packet is over the message limit.
        """

    @abstractmethod
    def close(self, peer: int, packet: bytes | None = None) -> None:
        """Ends a peer's session without error, after the pending packets and an optional last one."""

    @abstractmethod
    def call(self, callback: Callable[[], None]) -> None:
        """Runs `callback` soon, between two calls of the handler. Any thread may call it, for example a timer."""

    @abstractmethod
    def limit(self, peer: int, nbytes: int, exceeded: Callable[[], None], pending_nbytes: int = 0) -> None:
        """Limits the size of a peer's packets from now on; no byte after the first excess byte is read.

        Args:
            peer: its number.
            nbytes: largest packet, in bytes.
            exceeded: called in place of `received` for a larger packet; it must end the session.
            pending_nbytes: raises the limit of bytes that may wait to be sent to the peer, if it is larger.
        """

    def identity(self, peer: int) -> Identity:
        """Returns a peer's identity; `UNAUTHENTICATED` where the transport does not authenticate."""
        return UNAUTHENTICATED


HandlerFactory = Callable[[Sender], Handler]


class Server(ABC):
    """A running server.

    Attributes:
        address: of the server; for port 0, with the port that was found.
        bytes_sent: sum of `wire_nbytes` over the packets sent to all peers.
        bytes_received: sum of `wire_nbytes` over the packets received.
    """

    address: str
    bytes_sent: int = 0
    bytes_received: int = 0

    @abstractmethod
    def stop(self, grace_s: float = 5.0) -> None:
        """Ends every session and returns when the server has stopped. Stopping twice has no effect.

        A handler must not call it: the call waits for the handler.

        Args:
            grace_s: longest time to send pending packets, in seconds, after which sessions end without error; with 0,
                and for peers that are too slow, they break as in a crash.
        """

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the server has stopped; returns False if it has not within `timeout_s` seconds.

        Raises:
            Exception: the exception that left the handler and stopped the server.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
