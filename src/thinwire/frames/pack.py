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
    scales, payload = frame.scales, frame.payload
    head = _head(frame.version, frame.codec, frame.flags, frame.dtype, frame.shape)
    head += varint.write(len(scales))
    if scales:
        head += struct.pack(f"<{len(scales)}{'d' if frame.dtype == 'fp64' else 'f'}", *scales)
    head += varint.write(len(payload))
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
