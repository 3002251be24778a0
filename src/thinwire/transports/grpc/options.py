"""Options of both ends of a gRPC session: limits, keepalive, encryption, admission."""

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
GREETING = ("thinwire-session", "3")  # a server's metadata that accepts a session
TOKEN_KEY, TOKEN_SCHEME = "authorization", "Bearer "
"""The metadata field of a worker's token; no other field or message holds it."""
GOODBYE = b""
"""The last message of a worker that leaves without error; not part of a packet, and not counted. A stream that ends
without it has crashed; HTTP/2 alone does not show the difference."""

# Limits of one server's callers; docs/security.md lists them with all other limits.
MAX_CONNECTIONS = 4096
MAX_STREAMS = 8
"""Concurrent calls on one connection."""
QUEUED_S = 600
"""A call that the server has not started after so many seconds is dropped. gRPC's default of 30 s was too short on a
busy machine, where the server loads kernels during another worker's Join."""
HANDSHAKE_S = 60
"""Longest handshake of a connection, in seconds."""
IDLE_S = 60
"""Longest time of a connection without a call, in seconds."""
CHUNK_S = 120.0
"""Longest time in which a session's peer takes a chunk, or sends one within a packet, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpcOptions:
    """Options of a session; give both ends the same limits.

    Attributes:
        max_message_nbytes: largest packet, in bytes.
        max_pending_nbytes: bytes that may wait to be sent to one peer. At the limit a worker's `send` blocks; a server
            ends the session of a peer that does not read.
        keepalive_s: seconds without traffic after which a ping is sent; after as many without an answer the session
            breaks.
        shaping: an application-level thin link for this process, where the kernel cannot shape.
        tls: encryption; None sends without encryption.
        token: worker: returns the worker's secret; called for every session.
        authenticate: server: checks every worker before its first message is read; None admits all.
        insecure: allows, beyond this machine, a server without `tls` or `authenticate`, and a token without `tls`.
        health: server: an address, `host:port`, that answers `grpc.health.v1` without encryption.

    Raises:
        ConfigError: a value out of range.
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
        """Raises ConfigError where a server at `host` would admit any caller."""
        if self.insecure or is_loopback(host) or (self.tls is not None and self.authenticate is not None):
            return
        missing = "a certificate" if self.tls is None else ""
        if self.authenticate is None:
            missing += f"{' and ' if missing else ''}a token file"
        raise ConfigError(
            f"listening on {host} without {missing} admits every caller: give --tls-cert, --tls-key and --token-file "
            "(`thinwire certs DIR` makes them), or listen on 127.0.0.1, or say --insecure "
            "(in Python GrpcOptions(insecure=True)) where the network keeps strangers out"
        )

    def check_worker(self, host: str) -> None:
        """Raises ConfigError where a worker would send its token to `host` without encryption."""
        if self.token is not None and self.tls is None and not (self.insecure or is_loopback(host)):
            raise ConfigError(
                f"a token would travel to {host} in the clear: give --tls-ca (in Python Credentials(ca=…)), the "
                "certificate that signed the server's, or say --insecure"
            )

    def channel_arguments(self, connections: int = MAX_CONNECTIONS) -> list[tuple[str, int | str]]:
        """Returns gRPC's settings for either end; each end ignores those of the other.

        Args:
            connections: largest number of a server's concurrent connections.
        """
        keepalive_ms = round(self.keepalive_s * 1000)
        return [
            # A packet is sent in chunks (`chunks`): gRPC reads at most one before the receiver checks it.
            ("grpc.max_send_message_length", CHUNK_NBYTES),
            ("grpc.max_receive_message_length", CHUNK_NBYTES),
            # Server: a worker has one session on its connection, and sometimes a query of its error.
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.server_max_unrequested_time_in_server", QUEUED_S),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
            ("grpc.max_connection_idle_ms", IDLE_S * 1000),
            ("grpc.keepalive_time_ms", keepalive_ms),
            ("grpc.keepalive_timeout_ms", keepalive_ms),
            # Without this setting a frozen peer breaks only after gRPC's default, a minute.
            ("grpc.http2.ping_timeout_ms", keepalive_ms),
            # A worker computes for long times: pings without traffic are normal here, not abuse.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.max_ping_strikes", 0),
            # Server: a port in use must be an error, not a silent sharing of its connections.
            ("grpc.so_reuseport", 0),
            # Worker: one TCP connection per session; no copies for retries, which we never do; no proxy from the
            # environment; and short intervals between attempts while the server still starts.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
