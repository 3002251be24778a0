"""Frame bytes put together by hand, field by field, from docs/wire-format.md and not from the code under test."""

from __future__ import annotations

import struct

import xxhash


def varint(number: int) -> bytes:
    groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([group | 0x80 for group in groups[:-1]] + groups[-1:])


def frame(
    *,
    magic: bytes = b"TW",
    version: int = 1,
    codec: bytes = b"\x05",
    flags: int = 0x0100,
    dtype: int = 1,
    rank: int | None = None,
    dims: tuple[bytes, ...] = (b"\x03", b"\x04"),
    num_scales: bytes | None = None,
    scales: tuple[float, ...] = (0.7,),
    length: bytes | None = None,
    payload: bytes = b"\x76\xf3",
    checksum: bytes | None = None,
    after: bytes = b"",
) -> bytes:
    """A valid 3LC frame of shape (3, 4), but for the fields that are given; the checksum is right unless given."""
    body = b"".join(
        (
            magic,
            bytes([version]),
            codec,
            struct.pack("<HBB", flags, dtype, len(dims) if rank is None else rank),
            *dims,
            varint(len(scales)) if num_scales is None else num_scales,
            struct.pack(f"<{len(scales)}{'d' if dtype == 4 else 'f'}", *scales),
            varint(len(payload)) if length is None else length,
            payload,
        )
    )
    if checksum is None:
        checksum = xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    return body + checksum + after
