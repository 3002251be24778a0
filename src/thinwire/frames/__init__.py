"""Payload ↔ bytes: one encoded tensor with its header, checked before anything is allocated. No torch, no sockets."""

from thinwire.frames.layout import CODEC_NUMBERS, VERSION, Flags, Frame
from thinwire.frames.packing import pack, parse, write

__all__ = ["CODEC_NUMBERS", "VERSION", "Flags", "Frame", "pack", "parse", "write"]
