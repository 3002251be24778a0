"""What both ends of a session agree on: limits, encryption, who is let in."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.transports.addresses import is_loopback
from thinwire.transports.base import MAX_MESSAGE_NBYTES, MAX_PACKET_NBYTES, MAX_PENDING_NBYTES
from thinwire.transports.trust import Authenticate, Tls

GREETING = b"thinwire-sessions 1\n"
"""The server's first packet; a peer that says anything else is none of ours."""
MAX_CONNECTIONS = 4096
HANDSHAKE_S = 60.0
"""A connection whose handshake takes longer is cut."""
STALLED_S = 120.0
"""So is one on which less than a chunk of a packet moves in so many seconds."""
SIGN_OF_LIFE_S, SILENCE_S = 20.0, 600.0
"""An end that has nothing to say gives a sign of life so often; one that is silent for so long is frozen. The thread
that gives it may be loading kernels on a busy machine, so it is long."""
UNREACHABLE_S = 120.0
"""A machine whose kernel confirms nothing for so long is gone, or its cable is."""
LINGER_S = 5.0
"""For so long what the peer still sends is read and dropped once the last was said: else the last might be lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SocketOptions:
    """How a session behaves; give both ends the same limits.

    Attributes:
        max_message_nbytes: largest packet, in bytes.
        max_pending_nbytes: bytes that may wait to be sent to one peer, or to be received by one worker.
        tls: encryption, TLS 1.3, where both ends show certificates; None, on a loopback address only, sends in the
            clear.
        authenticate: server: is asked about every worker before anything that it says is read; None lets all in.

    Raises:
        ConfigError: a value out of range, or TLS without certificates.
    """

    max_message_nbytes: int = MAX_MESSAGE_NBYTES
    max_pending_nbytes: int = MAX_PENDING_NBYTES
    tls: Tls | None = None
    authenticate: Authenticate | None = None

    def __post_init__(self) -> None:
        if not 0 < self.max_message_nbytes <= MAX_PACKET_NBYTES or self.max_pending_nbytes <= 0:
            raise ConfigError(
                f"max_message_nbytes is {self.max_message_nbytes} and max_pending_nbytes {self.max_pending_nbytes}; "
                f"give 1 to {MAX_PACKET_NBYTES}, and a positive number"
            )
        tls = self.tls
        if tls is not None and None in (tls.root, tls.certificate, tls.key, tls.server_name):
            raise ConfigError("sessions over sockets need a root, a certificate, its key and the server's name")

    def check(self, host: str) -> None:
        """Raises ConfigError where what is sent to or from `host` could be read, or anybody could take part."""
        if self.tls is None and not is_loopback(host):
            raise ConfigError(f"sessions over sockets with {host} need TLS: without it they are for loopback addresses")
