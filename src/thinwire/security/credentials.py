"""The credentials of a process: files by name, and the transport's options made of them."""

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
        ca: PEM file of the certificates that sign the other end's. A server with it requires a certificate of workers.
            A worker with only a certificate trusts gRPC's public authorities, or those in the file that
            `GRPC_DEFAULT_SSL_ROOTS_FILE_PATH` names; with neither it does not encrypt.
        cert: PEM file of this process's certificate. A worker whose certificate's name is `worker-3` can join only as
            rank 3.
        key: PEM file of the certificate's private key.
        token_file: secrets, one a line, `TOKEN` or `rank=3 TOKEN`; a server admits workers that present one of them, a
            worker presents the first that is for its rank.
        insecure: allows, beyond this machine, a server without certificate or token, and a token without encryption.

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
        """Returns a server's options: `options` with these credentials.

        Raises:
            ConfigError: a file cannot be read, is damaged or holds something else, or a file that the others require is
                missing; the certificate, or every certificate of the ca, has expired or is not valid yet.
        """
        if self.ca is not None and self.cert is None:
            raise ConfigError("a server with ca (--tls-ca) needs a certificate, too (--tls-cert, --tls-key)")
        if self.cert is not None and self.token_file is None and not self.insecure:
            raise ConfigError(
                "a server with a certificate needs a token file too (--token-file): otherwise any certificate of the "
                "authority admits a caller. `thinwire certs DIR` makes one; --insecure goes without"
            )
        admission = None
        if self.token_file is not None or self.ca is not None:
            admission = Admission(None if self.token_file is None else TokenFile(self.token_file))
        return replace(self._base(options), authenticate=admission)

    def worker(self, rank: int | None = None, options: GrpcOptions | None = None) -> GrpcOptions:
        """Returns the options of worker `rank`: `options` with these credentials.

        Raises:
            ConfigError: a file cannot be read, is damaged or holds something else; the certificate, or every
                certificate of the ca, has expired or is not valid yet; no token for this rank.
        """
        token = None
        if self.token_file is not None:
            token = partial(TokenFile(self.token_file).own, rank)
            token()  # raises now if the token is missing
        return replace(self._base(options), token=token)

    def _base(self, options: GrpcOptions | None) -> GrpcOptions:
        """Returns the options with the credentials that both ends have."""
        options, tls = options or GrpcOptions(), None
        if self.ca is not None or self.cert is not None:
            tls = read_tls(self.ca, self.cert, self.key)
        return replace(options, tls=tls, insecure=self.insecure or options.insecure)
