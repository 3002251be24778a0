"""A stranger at a server's port: random bytes, with HTTP/2's greeting or without it, or connections dropped at once.

It runs by path, in a process and behind a link of its own, with the standard library alone.
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
from collections.abc import Sequence

KINDS = ("bytes", "http2", "drops")
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
_DROPS = 20


def main(arguments: Sequence[str]) -> None:
    """Speaks to `host port` as a stranger of a kind, with a seed."""
    host, port, kind, seed = arguments
    chance = random.Random(f"{seed}/{kind}")
    for _ in range(_DROPS if kind == "drops" else 1):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as peer:
            if kind != "drops":
                greeting = _GREETING if kind == "http2" else b""
                peer.sendall(greeting + chance.randbytes(chance.randrange(1, 1 << 16)))
                while peer.recv(1 << 16):
                    pass


if __name__ == "__main__":
    main(sys.argv[1:])
