"""What is in PEM files, and whether it can be used: found out where they are read.

Of a file that is not taken gRPC says to a worker that no server answered, and to a server nothing.
"""

from __future__ import annotations

import codecs
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.transports.trust import Tls

_PEM = b"-----BEGIN "
_MINUTE = "%Y-%m-%d %H:%M"


def read_tls(ca: str | Path | None, cert: str | Path | None, key: str | Path | None) -> Tls:
    """Reads one end's files; None of what it does not have.

    Raises:
        ConfigError: one cannot be read, is damaged or holds something else; `cert` and `key` do not belong together;
            `key` is encrypted; `cert`, or every certificate of `ca`, has run out or is not valid yet.
    """
    root, certificate, private = (_read(*each) for each in (("ca", ca), ("cert", cert), ("key", key)))
    tls = Tls(root=root, certificate=certificate, key=private)
    if root is not None:
        _check_authorities(f"ca {str(ca)!r}", root)
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
    return content.removeprefix(codecs.BOM_UTF8)  # an editor's, which gRPC stumbles over


def _check_authorities(ca: str, root: bytes) -> None:
    # Not with `cryptography`, which warns of old authorities. Names beside the PEM may be no ASCII.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=root.decode("ascii", "ignore"))
    except ssl.SSLError as error:
        raise ConfigError(f"{ca} holds no certificate, or a damaged one; give what signed the other end's") from error
    held = context.cert_store_stats()
    if held["x509"] > held["x509_ca"]:
        return  # one that is trusted for itself: `ssl` tells the dates of authorities alone
    dates = [(_date(each["notBefore"]), _date(each["notAfter"])) for each in context.get_ca_certs()]
    now = datetime.now(UTC)
    nearest = min(dates, key=lambda each: max(each[0] - now, now - each[1]))
    _check_dates(ca, *nearest)  # if it is not valid now, none is


def _date(text: Any) -> datetime:
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(text), UTC)


def _check_own(cert: str, certificate: bytes, key: str, private: bytes) -> None:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        own = x509.load_pem_x509_certificate(certificate)
    except ValueError as error:
        raise ConfigError(f"{cert} holds no certificate, or a damaged one; `thinwire certs DIR` makes some") from error
    try:
        theirs = load_pem_private_key(private, None).public_key()
    except TypeError as error:
        raise ConfigError(f"{key} is encrypted, and there is no password; `openssl pkey` decrypts it") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{key} holds no private key, or a damaged one; give the one of {cert}") from error
    if theirs != own.public_key():
        raise ConfigError(f"{key} is not the key of {cert}; give the two that were made together")
    _check_dates(cert, own.not_valid_before_utc, own.not_valid_after_utc)


def _check_dates(name: str, first: datetime, last: datetime) -> None:
    now = datetime.now(UTC)
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
