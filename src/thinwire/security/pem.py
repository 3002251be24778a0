"""Reads PEM files and checks their content.

For a bad file gRPC reports to a worker that no server answered, and reports no error to a server.
"""

from __future__ import annotations

import codecs
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import ConfigError
from thinwire.transports.trust import Tls

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

_PEM = b"-----BEGIN "
_MINUTE = "%Y-%m-%d %H:%M"


def read_tls(ca: str | Path | None, cert: str | Path | None, key: str | Path | None) -> Tls:
    """Reads one end's files; None: the end does not have the file.

    Raises:
        ConfigError: a file cannot be read, is damaged or holds something else; `key` is not the key of `cert`, or is
            encrypted; `cert`, or every certificate of `ca`, has expired or is not valid yet.
    """
    root, certificate, private = (_read(*each) for each in (("ca", ca), ("cert", cert), ("key", key)))
    tls = Tls(root=root, certificate=certificate, key=private)
    if root is not None:
        _check_dates(f"ca {str(ca)!r}", _certificates(f"ca {str(ca)!r}", root, "give what signed the other end's"))
    if certificate is not None and private is not None:
        _check_own(f"cert {str(cert)!r}", certificate, f"key {str(key)!r}", private)
    return tls


def _read(name: str, path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {str(path)!r} cannot be read: {error.strerror}") from error
    if _PEM not in content:
        raise ConfigError(f"{name} {str(path)!r} holds no PEM, which begins with {_PEM.decode()}…")
    return content.removeprefix(codecs.BOM_UTF8)  # written by some editors; gRPC cannot read it


def _certificates(name: str, content: bytes, hint: str) -> list[Certificate]:
    from cryptography import x509  # takes 0.1 s, and most processes have no certificate

    try:
        with warnings.catch_warnings():  # about the signatures of old authorities
            warnings.simplefilter("ignore")
            # Names beside the PEM need not be ASCII.
            return x509.load_pem_x509_certificates(content.decode("ascii", "ignore").encode())
    except ValueError as error:
        raise ConfigError(f"{name} holds no certificate, or a damaged one; {hint}") from error


def _check_own(cert: str, certificate: bytes, key: str, private: bytes) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    own, *_ = _certificates(cert, certificate, "`thinwire certs DIR` makes some")
    try:
        public = load_pem_private_key(private, None).public_key()
    except TypeError as error:
        raise ConfigError(f"{key} is encrypted, and there is no password; `openssl pkey` decrypts it") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{key} holds no private key, or a damaged one; give the one of {cert}") from error
    if public != own.public_key():
        raise ConfigError(f"{key} is not the key of {cert}; give the two that were made together")
    _check_dates(cert, [own])


def _check_dates(name: str, certificates: Sequence[Certificate]) -> None:
    """Raises ConfigError where no certificate is valid now."""
    now = datetime.now(UTC)
    dates = [(each.not_valid_before_utc, each.not_valid_after_utc) for each in certificates]
    first, last = min(dates, key=lambda each: max(each[0] - now, now - each[1]))
    if last < now:
        raise ConfigError(
            f"{name} has run out: it was valid until {last:{_MINUTE}}, and now it is {now:{_MINUTE}} (UTC); make new "
            "certificates with `thinwire certs DIR`, or set this machine's clock"
        )
    if first > now:
        raise ConfigError(
            f"{name} is not valid yet: it will be from {first:{_MINUTE}}, and now it is {now:{_MINUTE}} (UTC); set "
            "this machine's clock, or wait until then"
        )
