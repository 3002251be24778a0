"""Payload ↔ bytes: one encoded tensor with its header, checked before anything is allocated. No torch, no sockets."""

from thinwire.frames.frame import Frame
from thinwire.frames.layout import CODEC_NUMBERS, VERSION, Flags
from thinwire.frames.pack import pack, write
from thinwire.frames.parse import parse

__all__ = ["CODEC_NUMBERS", "VERSION", "Flags", "Frame", "pack", "parse", "write"]
