"""A stranger at a server's port: bytes at random, or HTTP/2 that is well-formed down to where the garbage begins.

It runs by path, in a process and behind a link of its own, with the standard library alone. The end of it is always
the same: a connection that the server closes, or that is dropped.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import sys
from collections.abc import Sequence

KINDS = ("bytes", "http2", "message", "drops")
"""Random bytes; a HTTP/2 greeting and random frames; a gRPC call with a random message; connections dropped at once."""

_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">I", 0)[1:] + b"\x04\x00" + bytes(4)
_DROPS = 20


def literal(name: str, value: str) -> bytes:
    """One header as HPACK writes it without a table.

    >>> literal("te", "trailers")
    b'\\x00\\x02te\\x08trailers'
    """
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def said(kind: str, chance: random.Random, path: str) -> bytes:
    """Returns what a stranger of this kind says after it has connected."""
    if kind == "bytes":
        return chance.randbytes(chance.randrange(1, 1 << 16))
    if kind == "http2":
        frames = [
            frame(
                chance.randrange(12), chance.randrange(256), chance.randrange(8), chance.randbytes(chance.randrange(99))
            )
            for _ in range(50)
        ]
        return _GREETING + b"".join(frames)
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    fields |= {"te": "trailers", "content-type": "application/grpc"}
    headers = b"".join(literal(name, value) for name, value in fields.items())
    garbage = chance.randbytes(chance.randrange(1, 4000))
    message = b"\x00" + struct.pack(">I", len(garbage)) + garbage
    return _GREETING + frame(1, 4, 1, headers) + frame(0, 0, 1, message)


def main(arguments: Sequence[str]) -> None:
    """Speaks to `host port` as a stranger of a kind, with a seed, calling a path."""
    host, port, kind, seed, path = arguments
    chance = random.Random(f"{seed}/{kind}")
    for _ in range(_DROPS if kind == "drops" else 1):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as peer:
            if kind != "drops":
                peer.sendall(said(kind, chance, path))
                while peer.recv(1 << 16):
                    pass


if __name__ == "__main__":
    main(sys.argv[1:])
