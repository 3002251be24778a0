"""Packet bytes put together by hand, field by field, from docs/wire-format.md and not from the code under test."""

from __future__ import annotations

import struct


def packet(
    *,
    magic: bytes = b"TP",
    version: int = 2,
    kind: int = 12,
    count: int | None = None,
    message: bytes = b"\x92\x07\x03",
    message_nbytes: int | None = None,
    nbytes: int | None = None,
    lengths: tuple[int, ...] | None = None,
    frames: tuple[bytes, ...] = (b"abc", b"", b"de"),
    after: bytes = b"",
) -> bytes:
    """A valid packet (`Shard(step=7, bucket=3)` with three frames), but for the fields that are given."""
    lengths = tuple(map(len, frames)) if lengths is None else lengths
    body = message + b"".join(struct.pack("<I", length) for length in lengths) + b"".join(frames)
    head = magic + struct.pack(
        "<BBIIQ",
        version,
        kind,
        len(lengths) if count is None else count,
        len(message) if message_nbytes is None else message_nbytes,
        20 + len(body) if nbytes is None else nbytes,
    )
    return head + body + after
