"""Frame → bytes."""

from __future__ import annotations

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


def pack(frame: Frame) -> bytes:
    """Returns the frame's bytes.

    The caller is one of our codecs, so the values are taken as they are; `parse` is the one that doubts.

    >>> from thinwire.frames import parse
    >>> frame = Frame(codec="fp32", dtype="fp32", shape=(1,), payload=b"abcd")
    >>> parse(pack(frame)) == frame
    True
    """
    number = CODEC_NUMBERS.get(frame.codec, NAMED_CODEC)
    head = bytearray(MAGIC)
    head += bytes((frame.version, number))
    if number == NAMED_CODEC:
        name = frame.codec.encode("ascii")
        head.append(len(name))
        head += name
    head += struct.pack("<HBB", frame.flags, DTYPE_NUMBERS[frame.dtype], len(frame.shape))
    for dim in frame.shape:
        head += varint.write(dim)
    head += varint.write(len(frame.scales))
    head += struct.pack(f"<{len(frame.scales)}{'d' if frame.dtype == 'fp64' else 'f'}", *frame.scales)
    head += varint.write(len(frame.payload))
    checksum = xxhash.xxh3_64(bytes(head))
    checksum.update(frame.payload)
    return b"".join((head, frame.payload, checksum.intdigest().to_bytes(8, "little")))
