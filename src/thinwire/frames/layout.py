"""The numbers of the frame format, version 1. `docs/wire-format.md` says the same in words; a test compares them.

A frame, little-endian, no holes, nothing after the checksum:

    magic 2 · version 1 · codec 1 [· name] · flags 2 · dtype 1 · rank 1 · dims (varint each)
    · number of scales (varint) · scales (4 bytes each, 8 for fp64) · payload length (varint) · payload · xxh3 8

A codec number is a promise: one number, one bit layout. Bits that change take a new codec or a new version.
"""

from __future__ import annotations

from enum import IntFlag

MAGIC = b"TW"
VERSION = 1

NAMED_CODEC = 0
"""Codec number of a codec that thinwire does not ship: its id follows, as a length byte and ASCII."""

CODEC_NUMBERS: dict[str, int] = {
    "fp32": 1,
    "fp16": 2,
    "bf16": 3,
    "int8": 4,
    "3lc": 5,
    "stoch3": 6,
    "terngrad": 7,
    "mqe1": 8,
    "onebit": 9,
    "topk": 10,
    "randomk": 11,
    "threshold": 12,
    "qsgd": 13,
    "dithering": 14,
    "truncate": 15,
    "entropy": 16,
    "votes": 17,
    "qsgd-ds": 18,
}

DTYPE_NUMBERS: dict[str, int] = {"fp32": 1, "fp16": 2, "bf16": 3, "fp64": 4}

MAX_RANK = 32
MAX_VALUES = 2**40
"""No tensor of a model comes near; it keeps products of hostile dimensions far from overflow."""
MAX_SCALES = 2**24
"""One scale per column of a very wide layer, or per bucket of a large one."""


class Flags(IntFlag):
    """Low byte: means the same in every codec. High byte: the codec's own, see each codec."""

    ZSTD = 0x0001
    """The payload went through zstd after the codec."""
    NON_FINITE = 0x0002
    """The sender's tensor held NaN or Inf: no payload, everyone skips this step."""
    OPTION_A = 0x0100
    OPTION_B = 0x0200
    OPTION_C = 0x0400
    OPTION_D = 0x0800


KNOWN_FLAGS = int(Flags.ZSTD | Flags.NON_FINITE | Flags.OPTION_A | Flags.OPTION_B | Flags.OPTION_C | Flags.OPTION_D)

OPTION_MASK = 0xFF00
"""The bits whose meaning is the codec's own."""

CHECKSUM_NBYTES = 8
