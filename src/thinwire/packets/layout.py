"""The numbers of the packet format. `docs/wire-format.md` says the same in words; a test compares them.

A packet, little-endian, no holes:

    magic 2 · version 1 · kind 1 · number of frames 4 · message length 4 · packet length 8
    · message (MessagePack) · length of each frame (4 each) · frames

The packet length counts all of it, head included, so a receiver can take a packet from the start of a larger buffer.
"""

from __future__ import annotations

import struct

MAGIC = b"TP"
VERSION = 2
"""Raised when an older peer could misread a conversation; packets of another version are refused."""

HEAD = struct.Struct("<2sBBIIQ")
HEAD_NBYTES = HEAD.size
LENGTH_NBYTES = 4

MAX_FRAMES = 2**17
"""More than a plan may have tables. A frame costs a reader some 200 bytes, an empty one costs its sender 4."""
MAX_MESSAGE_NBYTES = 2**26
"""A plan of the largest number of tables takes some 15 MB."""
MAX_FRAME_NBYTES = 2**32 - 1
