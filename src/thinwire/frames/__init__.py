"""Payload ↔ bytes: one encoded tensor with its header, checked before anything is allocated. No torch, no sockets."""

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
