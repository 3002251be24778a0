"""Makes certificates: an authority for tests and first steps, and throw-away ones for the ranks of a process group.

Keys are on the curve P-256. `cryptography` does the work; it is imported where it is used, because that takes 0.1 s
and most processes only read certificates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

Usage = Literal["server", "worker", "both"]
"""Which end of a session a certificate is for."""

_SKEW = timedelta(days=1)
"""A certificate holds from yesterday: clocks differ."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key, PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


class Authority:
    """Signs certificates.

    Args:
        name: its own.
        days: for how long everything that it signs holds, itself included; negative: it has run out.

    Attributes:
        issued: its own certificate and key.

    Example:
        >>> server = Authority("test CA", days=1).issue("server", ["localhost", "127.0.0.1"], "server")
        >>> server.certificate[:27]
        b'-----BEGIN CERTIFICATE-----'
    """

    def __init__(self, name: str, *, days: float = 365.0) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self._days = days
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = _sign(name, [], None, days, self._key, self._key, None)
        self.issued = _as_pem(self._certificate, self._key)

    def issue(self, name: str, hosts: Sequence[str], usage: Usage, *, days: float | None = None) -> Issued:
        """Returns a certificate that this authority has signed.

        Args:
            name: its common name; `worker-3` binds its holder to rank 3.
            hosts: names and IP addresses that it holds for; IPv6 with or without brackets.
            usage: which end of a session it is for.
            days: for how long, in place of the authority's own.
        """
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign(name, hosts, usage, self._days if days is None else days, key, self._key, self._certificate)
        return _as_pem(certificate, key)


def self_signed(name: str, host: str, *, days: float) -> Issued:
    """Returns a certificate that vouches for itself alone: for those who know that very certificate.

    Args:
        name, days: as in `Authority.issue`.
        host: the name that it holds for.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    return _as_pem(_sign(name, [host], "both", days, key, key, None), key)


def _sign(
    name: str,
    hosts: Sequence[str],
    usage: Usage | None,
    days: float,
    key: ec.EllipticCurvePrivateKey,
    signing: ec.EllipticCurvePrivateKey,
    signer: x509.Certificate | None,
) -> x509.Certificate:
    """Signs a certificate of `key`; without a usage it is an authority's, without a signer its own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    last = now + timedelta(days=days)
    authority = usage is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if signer is None else signer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, last) - _SKEW)
        .not_valid_after(last)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not authority,
                key_cert_sign=authority,
                crl_sign=authority,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
    )
    if not authority:
        server, worker = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
        uses = [server] if usage == "server" else [worker] if usage == "worker" else [server, worker]
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    if hosts:
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(signing, hashes.SHA256())


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(host.strip("[]")))
    except ValueError:
        if not set(":/ ").isdisjoint(host):
            raise ValueError(f"{host!r} has a port, a path or a space in it") from None
        return x509.DNSName(host)


def _as_pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Issued(certificate.public_bytes(Encoding.PEM), private)
