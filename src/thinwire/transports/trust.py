"""What the ends of a session show each other: certificates, tokens, and who a server then takes its caller for.

Values alone, the same on every wire: each turns them into its own library's, and `security` decides on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.errors import ConfigError
from thinwire.transports.base import Identity


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Encryption, with everything PEM-encoded.

    A server needs `certificate` and `key`; with `root` it also demands a certificate of its workers. A
    worker needs `root`, unless the system's certificate authorities vouch for the server, and its own
    `certificate` and `key` only where the server demands them.

    Attributes:
        root: certificates that sign the other end's.
        certificate: this end's, followed by those that lead to a root.
        key: the private key of `certificate`.
        server_name: name that the server's certificate must hold; None: the host that the worker connects to.

    Raises:
        ConfigError: A certificate without its key, or a key without its certificate.
    """

    root: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS needs certificate and key together; one of the two is missing")


@dataclass(frozen=True, slots=True)
class Caller:
    """What a worker shows before its first message.

    Attributes:
        token: a secret; None where none came.
        names: in its certificate, the common name first; empty without a certificate. The handshake has checked it.
    """

    token: str | None = field(repr=False)
    names: tuple[str, ...] = ()


Authenticate = Callable[[Caller], Identity]
"""Says who a caller is, or raises ProtocolError with what the caller is to be told."""
