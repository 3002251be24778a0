"""Payload ↔ bytes: one encoded tensor with its header, checked before anything is allocated. No torch, no sockets.

Example:
    >>> from thinwire import frames
    >>> frame = frames.Frame("int8", "fp32", (2, 1), (0.5,), 0, b"ab")
    >>> data = frames.pack(frame)
    >>> len(data), frames.parse(data) == frame
    (26, True)
"""

from thinwire.frames.layout import CODEC_NUMBERS, VERSION, Flags, Frame
from thinwire.frames.packing import head, pack, parse, with_checksum, without_checksum, write

__all__ = [
    "CODEC_NUMBERS",
    "VERSION",
    "Flags",
    "Frame",
    "head",
    "pack",
    "parse",
    "with_checksum",
    "without_checksum",
    "write",
]
