"""From packets' bytes to a socket's, and back: through TLS, or as they are. No socket is touched here."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from typing import Any, Protocol

from thinwire.transports.trust import Tls

RECORD_NBYTES = 16_384
"""The most that TLS decrypts at once."""


class Pipe(Protocol):
    """One end of one connection. Its methods raise ssl.SSLError where the other end is not to be trusted."""

    def feed(self, data: bytes) -> None:
        """Takes what the socket received."""

    def handshake(self) -> bool:
        """Goes on with the handshake; returns whether it is done."""

    def read(self) -> Iterator[bytes]:
        """Yields what was sent, as far as it has come."""

    def seal(self, data: bytes | memoryview) -> bytes:
        """Returns what the socket is to send for some bytes, after what was waiting."""

    def waiting(self) -> bytes:
        """Returns what the socket is to send of the pipe's own, such as a handshake."""

    def names(self) -> tuple[str, ...]:
        """Those in the other end's certificate, the common name first."""


class ClearPipe:
    """Bytes as they are."""

    def __init__(self) -> None:
        self._came: list[bytes] = []

    def feed(self, data: bytes) -> None:
        self._came.append(data)

    def handshake(self) -> bool:
        return True

    def read(self) -> Iterator[bytes]:
        came, self._came = self._came, []
        yield from came

    def seal(self, data: bytes | memoryview) -> bytes:
        return bytes(data)

    def waiting(self) -> bytes:
        return b""

    def names(self) -> tuple[str, ...]:
        return ()


class TlsPipe:
    """TLS in memory: a packet of some records is one write to the socket, and wakes its receiver once.

    Args:
        context: of this end.
        server_name: that the server's certificate must hold; None at the server itself.
    """

    def __init__(self, context: ssl.SSLContext, server_name: str | None) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server_name is None, server_hostname=server_name)

    def feed(self, data: bytes) -> None:
        self._in.write(data)

    def handshake(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def read(self) -> Iterator[bytes]:
        try:
            while data := self._tls.read(RECORD_NBYTES):
                yield data
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            return

    def seal(self, data: bytes | memoryview) -> bytes:
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        return self._out.read()

    def waiting(self) -> bytes:
        return self._out.read()

    def names(self) -> tuple[str, ...]:
        shown: Any = self._tls.getpeercert() or {}  # dictionaries of tuples of tuples
        subject = [value for part in shown.get("subject", ()) for key, value in part if key == "commonName"]
        return tuple(dict.fromkeys([*subject, *(value for _, value in shown.get("subjectAltName", ()))]))


def context(tls: Tls, *, server: bool) -> ssl.SSLContext:
    """Returns what all connections of one end share: both ends show a certificate, and must know the other's."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    if server:
        made.num_tickets = 0  # no connection takes up another's keys
    made.load_verify_locations(cadata=(tls.root or b"").decode())
    # ssl reads keys from files alone. On Linux this one is memory; elsewhere its owner alone can read it, and it goes.
    pem = (tls.certificate or b"") + (tls.key or b"")
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("tls"), "wb") as file:
            file.write(pem)
            file.flush()
            made.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    else:
        with tempfile.NamedTemporaryFile() as kept:
            kept.write(pem)
            kept.flush()
            made.load_cert_chain(kept.name)
    return made
