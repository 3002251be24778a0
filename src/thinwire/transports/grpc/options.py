"""What both ends of a gRPC session agree on: limits, keepalive, encryption, admission."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.transports.addresses import is_loopback
from thinwire.transports.base import CHUNK_NBYTES, MAX_MESSAGE_NBYTES, MAX_PACKET_NBYTES, MAX_PENDING_NBYTES
from thinwire.transports.links import Shaping
from thinwire.transports.trust import Authenticate, Tls

SERVICE = "thinwire.v3.Exchange"
METHOD = "Session"
GREETING = ("thinwire-session", "3")  # the metadata with which a server accepts a session
TOKEN_KEY, TOKEN_SCHEME = "authorization", "Bearer "
"""The metadata in which a worker shows its token; nothing else holds it."""
GOODBYE = b""
"""The worker's last message, when it leaves in good order; not of a packet, and not counted as one. A stream that ends
without it has crashed, which HTTP/2 alone does not tell apart."""

# What one server lets its callers have; docs/security.md lists them with all other limits.
MAX_CONNECTIONS = 4096
MAX_STREAMS = 8
"""Calls at a time on one connection."""
QUEUED_S = 600
"""A call that the server has not got round to for so long is dropped. gRPC's own 30 s cost a worker its training where
another's Join was being taken on a busy machine: kernels are loaded then."""
HANDSHAKE_S = 60
"""A connection whose handshake takes longer is cut."""
IDLE_S = 60
"""So is one without a call for so long."""
CHUNK_S = 120.0
"""So is a session whose peer takes, or sends in the middle of a packet, less than a chunk in so many seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpcOptions:
    """How a session behaves; give both ends the same limits.

    Attributes:
        max_message_nbytes: Largest packet, in bytes.
        max_pending_nbytes: Bytes that may wait to be sent to one peer. A worker's `send` blocks at it; a
            server ends the session of a peer that does not read.
        keepalive_s: After so many quiet seconds the other end is asked for a sign of life, and after
            another so many without one the session is broken.
        shaping: An application-level thin link for this process, where the kernel cannot shape.
        tls: Encryption; None sends in the clear.
        token: Worker: returns the secret that this worker shows, asked for anew for every session.
        authenticate: Server: is asked about every worker before its first message is read; None lets all in.
        insecure: Leaves out what is otherwise refused beyond this machine: a server without `tls` or `authenticate`,
            and a token without `tls`.
        health: Server: an address, `host:port`, at which `grpc.health.v1` says in the clear that it serves.

    Raises:
        ConfigError: A value out of range.
    """

    max_message_nbytes: int = MAX_MESSAGE_NBYTES
    max_pending_nbytes: int = MAX_PENDING_NBYTES
    keepalive_s: float = 20.0
    shaping: Shaping | None = None
    tls: Tls | None = None
    token: Callable[[], str] | None = None
    authenticate: Authenticate | None = None
    insecure: bool = False
    health: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.max_message_nbytes <= MAX_PACKET_NBYTES:
            raise ConfigError(f"max_message_nbytes is {self.max_message_nbytes}; give 1 to {MAX_PACKET_NBYTES}")
        if self.max_pending_nbytes <= 0:
            raise ConfigError(f"max_pending_nbytes is {self.max_pending_nbytes}; give a positive number")
        if not 1 <= self.keepalive_s <= 86_400:
            raise ConfigError(f"keepalive_s is {self.keepalive_s}; give 1 to 86400 seconds")

    def check_server(self, host: str) -> None:
        """Raises ConfigError where a server at `host` would let strangers in."""
        if self.insecure or is_loopback(host) or (self.tls is not None and self.authenticate is not None):
            return
        missing = "a certificate" if self.tls is None else ""
        if self.authenticate is None:
            missing += f"{' and ' if missing else ''}a token file"
        raise ConfigError(
            f"listening on {host} without {missing} lets everybody in who reaches it: give --tls-cert, --tls-key and "
            "--token-file (`thinwire certs DIR` makes them), or listen on 127.0.0.1, or say --insecure "
            "(in Python GrpcOptions(insecure=True)) where the network keeps strangers out"
        )

    def check_worker(self, host: str) -> None:
        """Raises ConfigError where a worker would send its token to `host` for all to read."""
        if self.token is not None and self.tls is None and not (self.insecure or is_loopback(host)):
            raise ConfigError(
                f"a token would travel to {host} in the clear: give --tls-ca (in Python Credentials(ca=…)), the "
                "certificate that signed the server's, or say --insecure"
            )

    def channel_arguments(self, connections: int = MAX_CONNECTIONS) -> list[tuple[str, int | str]]:
        """Returns gRPC's settings for either end; each end ignores what is only for the other.

        Args:
            connections: that a server takes at a time.
        """
        keepalive_ms = round(self.keepalive_s * 1000)
        return [
            # A packet travels in chunks (`chunks`): gRPC reads no more than one before it is looked at.
            ("grpc.max_send_message_length", CHUNK_NBYTES),
            ("grpc.max_receive_message_length", CHUNK_NBYTES),
            # Server: a worker has one session on its connection, and at times asks why there is none.
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.server_max_unrequested_time_in_server", QUEUED_S),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
            ("grpc.max_connection_idle_ms", IDLE_S * 1000),
            ("grpc.keepalive_time_ms", keepalive_ms),
            ("grpc.keepalive_timeout_ms", keepalive_ms),
            # Without this one a frozen peer is only given up after gRPC's own minute.
            ("grpc.http2.ping_timeout_ms", keepalive_ms),
            # A worker computes for long stretches: pings without traffic are our normal case, not abuse.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.max_ping_strikes", 0),
            # Server: a port that is taken must be an error, not a silent sharing of its connections.
            ("grpc.so_reuseport", 0),
            # Worker: one TCP connection per session; no copies kept for retries, which we never do; no
            # proxy from the environment; and try again soon while the server is still starting.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
