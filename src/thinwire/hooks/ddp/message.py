"""What one rank says to another about one bucket: a fixed head, the frames' lengths, the frames.

    magic 2 · version 1 · flags 1 · step 4 · bucket 4 · frames 4 · body length 8 · [length (varint) …] · [frame …]

A receiver lends a buffer that is long enough for the worst case and reads the length from the head, so no sizes
travel ahead of the data. Nothing here knows what the frames hold.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

from thinwire.errors import FrameError, ProtocolError
from thinwire.frames import varint

_HEAD = struct.Struct("<2sBBIIIQ")
_MAGIC = b"TD"
_VERSION = 1
HEAD_NBYTES = _HEAD.size
TEXT_NBYTES = 1024
"""Longest reason that an ABORT message carries."""


class Say(IntFlag):
    """What a message says besides its frames."""

    NOTHING = 0
    VOID = 1
    """The sender holds NaN or Inf in this bucket: nobody takes this step."""
    ABORT = 2
    """The sender has given up; the body is the reason."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message that was read: the frames are views into the receiver's buffer."""

    say: Say
    frames: list[memoryview]
    text: str = ""


def pack(step: int, bucket: int, frames: Sequence[bytes], say: Say = Say.NOTHING, text: str = "") -> bytearray:
    """Returns the bytes of a message.

    Example:
        >>> read(memoryview(pack(3, 0, [b"one", b""])), 3, 0, 2, "rank 1").frames[0].tobytes()
        b'one'
    """
    if say & Say.ABORT:
        body = [text.encode()[:TEXT_NBYTES]]
        count = 0
    else:
        count = len(frames)
        body = [*(varint.write(len(frame)) for frame in frames), *frames]
    length = sum(map(len, body))
    out = bytearray(_HEAD.pack(_MAGIC, _VERSION, int(say), step & 0xFFFFFFFF, bucket, count, length))
    for part in body:
        out += part
    return out


def read(data: memoryview, step: int, bucket: int, frames: int, sender: str) -> Message:
    """Reads the message at the start of `data`, which may be longer.

    Args:
        data: the receiver's buffer.
        step: the step that the receiver is at.
        bucket: the bucket that it waits for.
        frames: how many frames there must be, unless the sender is out of this step.
        sender: for error messages.

    Raises:
        ProtocolError: anything but that message.
    """
    magic, version, flags, said_step, said_bucket, count, length = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError(f"{sender} sent {bytes(data[:3])!r}; a message of this version begins with TD and 1")
    if flags not in (Say.NOTHING, Say.VOID, Say.ABORT):
        raise ProtocolError(f"{sender} sent flags {flags:#04x}, which mean nothing here")
    if length > len(data) - HEAD_NBYTES:
        raise ProtocolError(f"{sender} declares {length} bytes; at most {len(data) - HEAD_NBYTES} were expected")
    body = data[HEAD_NBYTES : HEAD_NBYTES + length]
    if flags == Say.ABORT:
        return Message(Say.ABORT, [], bytes(body).decode(errors="replace"))
    if (said_step, said_bucket) != (step & 0xFFFFFFFF, bucket):
        raise ProtocolError(
            f"{sender} is at step {said_step}, bucket {said_bucket}; this rank is at step {step}, bucket {bucket}"
        )
    if flags == Say.VOID:
        return Message(Say.VOID, [])
    if count != frames:
        raise ProtocolError(f"{sender} sent {count} frames for bucket {bucket}; {frames} were expected")
    lengths, at = [], 0
    try:
        for _ in range(count):
            size, at = varint.read(body, at, "a frame's length")
            lengths.append(size)
    except FrameError as error:
        raise ProtocolError(f"{sender}: {error}") from error
    if at + sum(lengths) != length:
        raise ProtocolError(f"{sender} sent {length} bytes whose parts add up to {at + sum(lengths)}")
    parts = []
    for size in lengths:
        parts.append(body[at : at + size])
        at += size
    return Message(Say.NOTHING, parts)
