"""Finds out why a server closes a worker's connection; gRPC reports the same error as for a missing server.

gRPC's servers close the connection of a refused worker without TLS's alert for it: in TLS 1.3 after the worker's
handshake, in TLS 1.2 within it. Other causes, such as a proxy whose server has not started yet, close in both or in
neither. After these handshakes nothing is sent, so the server's certificate is not checked.
"""

from __future__ import annotations

import socket
import ssl
from ssl import TLSVersion


def wants_tls(host: str, port: int, timeout_s: float) -> bool:
    """Whether a server uses TLS; False also where that is uncertain or the answer takes longer."""
    try:
        return _completes(host, port, timeout_s, TLSVersion.TLSv1_3)
    except (OSError, ValueError):  # a host that is not a valid name raises ValueError
        return False


def wants_certificate(host: str, port: int, timeout_s: float) -> bool:
    """Whether a server refuses a worker without a certificate; False also where that is uncertain."""

    def completes(version: TLSVersion) -> bool:
        return _completes(host, port, timeout_s, version)

    try:
        # Twice: a server that is full, or about to end, closes some connections.
        return all(completes(TLSVersion.TLSv1_3) and not completes(TLSVersion.TLSv1_2) for _ in range(2))
    except (OSError, ValueError):
        return False


def _completes(host: str, port: int, timeout_s: float, version: TLSVersion) -> bool:
    """Whether a handshake succeeds; False where the server closes it. Raises OSError or ValueError otherwise."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    bare = host.strip("[]")
    with socket.create_connection((bare, port), timeout_s) as connection:
        try:
            context.wrap_socket(connection, server_hostname=bare).close()
        except (ssl.SSLEOFError, ConnectionResetError):  # closed without an alert, which would give a reason
            return False
    return True
