"""Certificates and tokens that the ends of a session present; `security` checks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.errors import ConfigError
from thinwire.transports.base import Identity


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Encryption, with everything PEM-encoded.

    A server needs `certificate` and `key`; with `root` it also requires a certificate of its workers. A worker without
    `root` trusts the public authorities in gRPC's package, or those in the file that the environment variable
    GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names, never the system's; it needs `certificate` and `key` only where the server
    requires them.

    Attributes:
        root: certificates that sign the other end's.
        certificate: this end's, followed by its chain to a root.
        key: the private key of `certificate`.

    Raises:
        ConfigError: a certificate without its key, or a key without its certificate.
    """

    root: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_pair(self.certificate, self.key)


def check_pair(certificate: object, key: object) -> None:
    """Raises ConfigError where one of the two is None and the other is not."""
    if (certificate is None) != (key is None):
        raise ConfigError("a certificate needs its key and a key its certificate; one of the two is missing")


@dataclass(frozen=True, slots=True)
class Caller:
    """A worker's token and certificate names, presented before its first message."""

    token: str | None = field(repr=False)
    """A secret; None without one."""
    names: tuple[str, ...] = ()
    """Names in its certificate, the common name first; empty without one. The handshake has verified them."""


Authenticate = Callable[[Caller], Identity]
"""Returns a caller's identity, or raises ProtocolError with the message for the caller."""
