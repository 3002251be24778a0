"""What the ends of a session show each other: certificates and tokens. `security` decides on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.errors import ConfigError
from thinwire.transports.base import Identity


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Encryption, with everything PEM-encoded.

    A server needs `certificate` and `key`; with `root` it also demands a certificate of its workers. A worker without
    `root` trusts the public authorities that gRPC brings with it, or those in the file that the environment variable
    GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names, never the system's; it needs `certificate` and `key` only where the server
    demands them.

    Attributes:
        root: certificates that sign the other end's.
        certificate: this end's, followed by those that lead to a root.
        key: the private key of `certificate`.

    Raises:
        ConfigError: A certificate without its key, or a key without its certificate.
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
    """What a worker shows before its first message."""

    token: str | None = field(repr=False)
    """A secret; None where none came."""
    names: tuple[str, ...] = ()
    """In its certificate, the common name first; empty without a certificate. The handshake has checked it."""


Authenticate = Callable[[Caller], Identity]
"""Says who a caller is, or raises ProtocolError with what the caller is to be told."""
