"""Why a server hangs up on a worker, which gRPC does not tell from no server at all.

gRPC's servers hang up on a worker that they refuse, without the alert that TLS has for it; but in TLS 1.3 after the
worker's handshake, and in TLS 1.2 within it. Anything else that hangs up, such as a proxy whose server is not there
yet, does so in both or in neither. After these handshakes nothing is sent, so the server's certificate is not checked.
"""

from __future__ import annotations

import socket
import ssl
from ssl import TLSVersion


def wants_tls(host: str, port: int, timeout_s: float) -> bool:
    """Whether a server uses TLS; False also where that is not sure, or it takes longer to answer."""
    try:
        return _completes(host, port, timeout_s, TLSVersion.TLSv1_3)
    except (OSError, ValueError):  # a host that cannot be a name is a ValueError
        return False


def wants_certificate(host: str, port: int, timeout_s: float) -> bool:
    """Whether a server refuses a worker without a certificate; False also where that is not sure."""

    def completes(version: TLSVersion) -> bool:
        return _completes(host, port, timeout_s, version)

    try:
        # Twice: a server that is full, or about to end, hangs up on some.
        return all(completes(TLSVersion.TLSv1_3) and not completes(TLSVersion.TLSv1_2) for _ in range(2))
    except (OSError, ValueError):
        return False


def _completes(host: str, port: int, timeout_s: float, version: TLSVersion) -> bool:
    """Whether a handshake ends well; False where the server hangs up. Raises OSError or ValueError for all else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    bare = host.strip("[]")
    with socket.create_connection((bare, port), timeout_s) as connection:
        try:
            context.wrap_socket(connection, server_hostname=bare).close()
        except (ssl.SSLEOFError, ConnectionResetError):  # not an alert, with which others say why
            return False
    return True
