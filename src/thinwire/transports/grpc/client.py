"""The worker's end of a gRPC session: a blocking connection over one bidirectional stream.

Two threads run between the caller and gRPC. gRPC's thread takes packets from the outbox through a generator; a reader
thread fills the inbox, so that `receive` can have a deadline. Both boxes are bounded in bytes: a full outbox blocks
`send`, a full inbox stops reading, and HTTP/2's flow control then slows the server down. Shaping sleeps in the threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from thinwire.errors import DeadlineError, ProtocolError, TransportError
from thinwire.extras import optional
from thinwire.transports.addresses import parse_dialled
from thinwire.transports.base import Connection, check_packet, message_wire_nbytes, wire_nbytes
from thinwire.transports.grpc.chunks import Assembly, split
from thinwire.transports.grpc.handshakes import wants_certificate, wants_tls
from thinwire.transports.grpc.options import (
    GOODBYE,
    GREETING,
    METHOD,
    QUEUED_S,
    SERVICE,
    TOKEN_KEY,
    TOKEN_SCHEME,
    GrpcOptions,
)
from thinwire.transports.inbox import Inbox

if TYPE_CHECKING:
    import grpc
else:
    grpc = optional("grpc", "a parameter server")

_log = logging.getLogger(__name__)

QUERY_AFTER_S, QUERY_S = 1.0, 0.5
"""Seconds without an answer after which the connection's state is queried, and longest time of a query."""
FINAL = ("handshake failed", "verification check failed", "is not in peer certificate")
"""gRPC's texts for untrusted certificates; the last two, old and new, for a certificate of another host."""
CLOSED = ("Socket closed", "Connection reset")
"""gRPC's texts for a server that closes an accepted connection."""
NO_METHOD = "None"
"""A method that no server has: an answer shows that the handshake is complete."""


def connect(address: str, *, connect_timeout_s: float = 10.0, options: GrpcOptions | None = None) -> Connection:
    """Begins a session with the server at `address`, and waits for a server that still starts.

    Args:
        address: `host:port` or `grpc://host:port`.
        connect_timeout_s: longest wait for a connection, in seconds. A server that has taken it may be busy, and is
            waited for.
        options: limits, keepalive, shaping and encryption; None takes the defaults.

    Raises:
        ConfigError: the address is invalid, or a token would be sent without encryption.
        DeadlineError: no server answered in time.
        TransportError: the server refuses this worker, or one end does not trust the other's certificate.
    """
    return GrpcConnection(address, connect_timeout_s, options or GrpcOptions())


class GrpcConnection(Connection):
    """See `connect`."""

    def __init__(self, address: str, connect_timeout_s: float, options: GrpcOptions) -> None:
        host, port = parse_dialled(address)
        options.check_worker(host)
        self.address = f"{host}:{port}"
        self._options = options
        # Before the channel is opened: the token's file may not be readable.
        metadata = None if options.token is None else ((TOKEN_KEY, TOKEN_SCHEME + options.token()),)
        self._channel = self._open_channel()
        self._outbox, self._outbox_nbytes = deque[bytes](), 0
        self._out = threading.Condition()
        self._assembly = Assembly()
        self._inbox = Inbox(self.address, options.max_pending_nbytes)  # over when the stream is
        self._ready = False  # the server has answered
        # Messages are bytes: `bytes` returns the same object.
        open_stream = self._channel.stream_stream(
            f"/{SERVICE}/{METHOD}", request_serializer=bytes, response_deserializer=bytes
        )
        self._call = open_stream(self._outgoing(), wait_for_ready=True, metadata=metadata)
        self._reader = threading.Thread(target=self._read, name=f"thinwire-read-{self.address}", daemon=True)
        self._reader.start()
        self._await_server(connect_timeout_s)

    def send(self, packet: bytes) -> None:
        check_packet(packet, self._options.max_message_nbytes)
        limit = self._options.max_pending_nbytes
        nbytes = wire_nbytes(packet)
        with self._out:
            self._out.wait_for(
                lambda: self._inbox.ended or not self._outbox_nbytes or self._outbox_nbytes + nbytes <= limit
            )
            self._inbox.check_open()
            self._outbox.append(packet)
            self._outbox_nbytes += nbytes
            self._out.notify_all()

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        return self._inbox.take(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        self._leave()
        self._reader.join(timeout_s)
        late = self._reader.is_alive()
        self._close_stream()
        if late:
            raise DeadlineError(
                f"the server at {self.address} did not confirm the end of the session within {timeout_s:g} s; "
                f"the last packets may be lost"
            )

    def abort(self) -> None:
        # Ended before closing: otherwise gRPC's thread might still send the goodbye.
        self._finish(f"this end has closed the session with {self.address}")
        self._leave()
        self._close_stream()

    def _open_channel(self) -> grpc.Channel:
        arguments, tls = self._options.channel_arguments(), self._options.tls
        if tls is None:
            return grpc.insecure_channel(self.address, arguments)
        credentials = grpc.ssl_channel_credentials(tls.root, tls.key, tls.certificate)
        return grpc.secure_channel(self.address, credentials, arguments)

    def _await_server(self, timeout_s: float) -> None:
        begun, answered, busy, told, failure, refusal = time.monotonic(), False, False, "", "", ""
        while not (answered or refusal) and (left := begun + timeout_s - time.monotonic()) > 0:
            with self._inbox.changed:
                wait_for = self._inbox.changed.wait_for
                answered = wait_for(lambda: self._ready or self._inbox.over, min(left, QUERY_AFTER_S))
            if answered:
                break
            if not busy and (busy := self._is_connected()):
                timeout_s = max(timeout_s, QUEUED_S)
            state = f"the server at {self.address} is busy" if busy else f"no server at {self.address} yet"
            if told != state:
                _log.warning("%s: this worker waits for it, %g s at most", state, timeout_s)
                told = state
            # Not while the server is busy: there is no failure then, and queries would use up the connection's streams.
            failure = "" if busy else self._last_failure()
            refusal = self._refusal(failure)
        error = self._inbox.error
        if answered and error is None:
            return
        self.abort()
        if error is not None:
            raise TransportError(error)
        if refusal:
            raise TransportError(refusal)
        if busy:
            raise DeadlineError(f"the server at {self.address} did not answer within {timeout_s:g} s: it may hang")
        if "Socket closed" in failure:
            wanted = "; it may want a certificate (--tls-cert) that its own ca has signed"
            failure = "it hung up" + (wanted if self._options.tls is not None else "")
        failure = f" ({failure})" if failure else ""
        raise DeadlineError(
            f"no server answered at {self.address} within {timeout_s:g} s; check that it runs, that the "
            f"address is right and reachable, and that both ends use TLS or neither does{failure}"
        )

    def _is_connected(self) -> bool:
        """Whether what listens at the address speaks HTTP/2 and, with TLS, trusts this worker."""
        ready = grpc.channel_ready_future(self._channel)
        try:
            ready.result(timeout=QUERY_S)
        except grpc.FutureTimeoutError:
            return False
        finally:
            ready.cancel()
        return True

    def _last_failure(self) -> str:
        """Returns why there is no connection, which the session's call does not report; empty with a connection."""
        query = self._channel.unary_unary(
            f"/{SERVICE}/{NO_METHOD}", request_serializer=bytes, response_deserializer=bytes
        )
        try:
            query(b"", timeout=QUERY_S)
        except grpc.RpcError as status:
            return str(status.details()) if status.code() is grpc.StatusCode.UNAVAILABLE else ""
        return ""

    def _refusal(self, failure: str) -> str:
        """Returns a message where waiting cannot help; empty where it may."""
        if any(text in failure for text in FINAL):
            return (
                f"{self.address} and this worker do not trust each other: {failure}. The server must use TLS and have "
                "a certificate for this very host that this worker's ca (--tls-ca) has signed"
            )
        tls = self._options.tls
        if not any(text in failure for text in CLOSED):
            return ""
        place = parse_dialled(self.address)
        if tls is None and wants_tls(*place, QUERY_S):
            return (
                f"the server at {self.address} uses TLS, and this worker does not: give it --tls-ca, the authority "
                "that signed the server's certificate (in Python Credentials(ca=…))"
            )
        if tls is None or tls.certificate is not None or not wants_certificate(*place, QUERY_S):
            return ""
        return (
            f"the server at {self.address} lets in only workers with a certificate, and this one has none: give it "
            "--tls-cert and --tls-key (in Python Credentials(cert=…, key=…)), which the server's own ca has signed"
        )

    def _outgoing(self) -> Iterator[bytes]:
        """Yields messages to gRPC's thread, which takes the next one when it has sent the last."""
        shaping = self._options.shaping
        while True:
            with self._out:
                self._out.wait_for(lambda: self._outbox or self._inbox.ended)
                if self._inbox.over:
                    return
                if not self._outbox:
                    break
                packet = self._outbox.popleft()
            for message in split(packet):
                nbytes = message_wire_nbytes(len(message))
                if shaping is not None:
                    time.sleep(shaping.egress.delay(nbytes, time.monotonic()))
                self.bytes_sent += nbytes
                yield message
            with self._out:
                self._outbox_nbytes -= wire_nbytes(packet)
                self._out.notify_all()
        yield GOODBYE

    def _read(self) -> None:
        error: str | None = None
        try:
            if GREETING in (tuple(pair) for pair in self._call.initial_metadata() or ()):
                with self._inbox.changed:
                    self._ready = True
                    self._inbox.changed.notify_all()
            for message in self._call:
                self._arrived(message)
        except grpc.RpcError as status:
            error = self._explain(status)
        except ProtocolError as broken:
            error = f"the server at {self.address} broke the conversation: {broken}"
            self._call.cancel()  # type: ignore[no-untyped-call]
        self._finish(error)

    def _arrived(self, message: bytes) -> None:
        if message == GOODBYE and not self._assembly.nbytes:
            raise ProtocolError("the worker's goodbye came from a server")
        nbytes = message_wire_nbytes(len(message))
        if self._options.shaping is not None:
            time.sleep(self._options.shaping.ingress.arrival_delay(nbytes, time.monotonic()))
        packet = self._assembly.add(message)
        if max(self._assembly.nbytes, len(packet or b"")) > self._options.max_message_nbytes:
            raise ProtocolError(f"it sent a packet over the message limit of {self._options.max_message_nbytes} bytes")
        self._inbox.wait_for_room()
        self.bytes_received += nbytes
        if packet is not None:
            self._inbox.put(packet)

    def _explain(self, status: grpc.RpcError) -> str:
        # A stream raises its call, which has the code and the details.
        code, details = self._call.code(), self._call.details()
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return f"what listens at {self.address} is no thinwire server of this version: {details}"
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return f"the server at {self.address} does not let this worker in: {details}"
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return f"lost the server at {self.address}: {details}"
        return f"the server at {self.address} broke the session off: {details}"

    def _leave(self) -> None:
        self._inbox.leave()
        with self._out:
            self._out.notify_all()

    def _finish(self, error: str | None) -> None:
        self._inbox.finish(error)
        with self._out:
            self._out.notify_all()

    def _close_stream(self) -> None:
        self._call.cancel()  # type: ignore[no-untyped-call]
        self._channel.close()
        self._finish(None)
        self._reader.join(1.0)  # a reader asleep on a thin link ends later by itself
