"""What a process shows of itself and whom it trusts: files by name, and the transport's options that they make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.security.admission import Admission
from thinwire.security.pem import read_tls
from thinwire.security.tokens import TokenFile
from thinwire.transports.grpc import GrpcOptions
from thinwire.transports.trust import check_pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """A server's or worker's certificate, key and token, and the authority that it trusts. `thinwire certs` makes them.

    Args:
        ca: PEM file of the certificates that sign the other end's. A server with it asks workers for a certificate. A
            worker with a certificate alone trusts gRPC's public authorities, or those in the file that
            `GRPC_DEFAULT_SSL_ROOTS_FILE_PATH` names; with neither it speaks in the clear.
        cert: PEM file of this process's certificate. A worker of rank 3 whose certificate's name is `worker-3` can
            join as rank 3 alone.
        key: PEM file of the certificate's private key.
        token_file: secrets, one a line, `TOKEN` or `rank=3 TOKEN`; a server lets in who shows one of them, a worker
            shows the first that is for its rank.
        insecure: leaves out what is otherwise refused beyond this machine: a server without certificate or token, a
            token that travels in the clear.

    Raises:
        ConfigError: a certificate without its key, or a key without its certificate.

    Example:
        >>> mine = Credentials(ca="ca.pem", cert="worker-0.pem", key="worker-0.key", token_file="worker-0.token")
        >>> Credentials(cert="worker-0.pem")
        Traceback (most recent call last):
        thinwire.errors.ConfigError: a certificate needs its key and a key its certificate; one of the two is missing
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None
    token_file: str | Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        check_pair(self.cert, self.key)

    def server(self, options: GrpcOptions | None = None) -> GrpcOptions:
        """Returns a server's options, `options` with these credentials in them.

        Raises:
            ConfigError: a file cannot be read, is damaged or holds something else, or one is missing that goes with the
                others; the certificate, or all that the ca holds, has run out or is not valid yet.
        """
        if self.ca is not None and self.cert is None:
            raise ConfigError("a server with ca (--tls-ca) needs a certificate of its own (--tls-cert, --tls-key)")
        if self.cert is not None and self.token_file is None and not self.insecure:
            raise ConfigError(
                "a server with a certificate needs a token file too (--token-file): who has a certificate of the "
                "authority for something else would be let in. `thinwire certs DIR` makes one; --insecure goes without"
            )
        admission = None
        if self.token_file is not None or self.ca is not None:
            admission = Admission(None if self.token_file is None else TokenFile(self.token_file))
        return replace(self._base(options), authenticate=admission)

    def worker(self, rank: int | None = None, options: GrpcOptions | None = None) -> GrpcOptions:
        """Returns the options of worker `rank`, `options` with these credentials in them.

        Raises:
            ConfigError: a file cannot be read, is damaged or holds something else; the certificate, or all that the ca
                holds, has run out or is not valid yet; no token for this rank.
        """
        token = None
        if self.token_file is not None:
            token = partial(TokenFile(self.token_file).own, rank)
            token()  # what is missing is said now
        return replace(self._base(options), token=token)

    def _base(self, options: GrpcOptions | None) -> GrpcOptions:
        """Returns the options with what both ends have."""
        options, tls = options or GrpcOptions(), None
        if self.ca is not None or self.cert is not None:
            tls = read_tls(self.ca, self.cert, self.key)
        return replace(options, tls=tls, insecure=self.insecure or options.insecure)
