"""Makes certificates: an authority for tests and first steps, and temporary ones. Keys are on the curve P-256."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Usage = Literal["server", "worker"]
"""The end of a session that a certificate is for."""
_USES = {
    "server": [ExtendedKeyUsageOID.SERVER_AUTH],
    "worker": [ExtendedKeyUsageOID.CLIENT_AUTH],
}
_OTHER_USES = dict.fromkeys(
    ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
    False,
)
_SKEW = timedelta(days=1)
"""A certificate is valid from a day before it is made, because clocks differ."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key, PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


class Authority:
    """Signs certificates.

    Args:
        name: of the authority.
        days: validity of its certificate and of those that it signs; negative: expired.

    Attributes:
        issued: the authority's certificate and key.

    Example:
        >>> server = Authority("test CA", days=1).issue("server", ["localhost", "127.0.0.1"], "server")
        >>> server.certificate[:27]
        b'-----BEGIN CERTIFICATE-----'
    """

    def __init__(self, name: str, *, days: float = 365.0) -> None:
        self._name, self._days, self._key = name, days, ec.generate_private_key(ec.SECP256R1())
        self.issued = _sign(name, [], None, days, self._key, name, self._key)

    def issue(self, name: str, hosts: Sequence[str], usage: Usage, *, days: float | None = None) -> Issued:
        """Returns a certificate that this authority has signed.

        Args:
            name: its common name; `worker-3` binds its holder to rank 3.
            hosts: names and IP addresses that it is valid for; IPv6 with or without brackets.
            usage: the end of a session that it is for.
            days: its validity, in place of the authority's.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        return _sign(name, hosts, usage, self._days if days is None else days, key, self._name, self._key)


def _sign(
    name: str,
    hosts: Sequence[str],
    usage: Usage | None,
    days: float,
    key: ec.EllipticCurvePrivateKey,
    signer: str,
    signing: ec.EllipticCurvePrivateKey,
) -> Issued:
    """Signs a certificate of `key`; without a usage, an authority's."""
    now = datetime.now(UTC)
    last = now + timedelta(days=days)
    authority = usage is None
    subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, signer))
    uses = x509.KeyUsage(digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, **_OTHER_USES)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, last) - _SKEW)
        .not_valid_after(last)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(uses, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
    )
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage(_USES[usage]), critical=False)
    if hosts:
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Issued(builder.sign(signing, hashes.SHA256()).public_bytes(Encoding.PEM), private)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host.strip("[]")))
    except ValueError:
        if not set(":/ ").isdisjoint(host):
            raise ValueError(f"{host!r} has a port, a path or a space in it") from None
        return x509.DNSName(host)
