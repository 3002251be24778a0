"""Frame → bytes."""

from __future__ import annotations

import functools
import struct

import xxhash

from thinwire.frames import varint
from thinwire.frames.frame import Frame
from thinwire.frames.layout import (
    CODEC_NUMBERS,
    DTYPE_NUMBERS,
    MAGIC,
    NAMED_CODEC,
    VERSION,
)

_TENSORS = 4096
"""Heads that are kept: a model's tensors, each way. Half the cost of a small frame is its head."""


def pack(frame: Frame) -> bytes:
    """Returns the frame's bytes.

    The caller is one of our codecs, so the values are taken as they are; `parse` is the one that doubts.

    >>> from thinwire.frames import parse
    >>> frame = Frame(codec="fp32", dtype="fp32", shape=(1,), payload=b"abcd")
    >>> parse(pack(frame)) == frame
    True
    """
    return write(frame.codec, frame.dtype, frame.shape, frame.scales, frame.flags, frame.payload, frame.version)


def write(
    codec: str,
    dtype: str,
    shape: tuple[int, ...],
    scales: tuple[float, ...],
    flags: int,
    payload: bytes | memoryview,
    version: int = VERSION,
) -> bytes:
    """As `pack`, of a frame's fields, for the sender that would make a `Frame` only for this."""
    head = _head(version, codec, flags, dtype, shape)
    if scales:
        packed = struct.pack(f"<{len(scales)}{'d' if dtype == 'fp64' else 'f'}", *scales)
        head = b"".join((head, varint.write(len(scales)), packed, varint.write(len(payload))))
    else:
        head = b"".join((head, b"\0", varint.write(len(payload))))
    checksum = xxhash.xxh3_64(head)
    checksum.update(payload)
    return b"".join((head, payload, checksum.digest()[::-1]))  # xxhash gives the canonical form, big-endian


@functools.lru_cache(_TENSORS)
def _head(version: int, codec: str, flags: int, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Everything before the scales: the same in every frame of one tensor."""
    number = CODEC_NUMBERS.get(codec, NAMED_CODEC)
    head = bytearray(MAGIC)
    head += bytes((version, number))
    if number == NAMED_CODEC:
        name = codec.encode("ascii")
        head.append(len(name))
        head += name
    head += struct.pack("<HBB", flags, DTYPE_NUMBERS[dtype], len(shape))
    for dim in shape:
        head += varint.write(dim)
    return bytes(head)
