"""Messages ↔ bytes: one versioned, length-prefixed packet for both modes. No torch, no sockets."""

from thinwire.packets.batch import MAX_BATCHED_NBYTES, BatchedTensor, EncodedTensor
from thinwire.packets.packet import (
    HEAD_NBYTES,
    LENGTH_NBYTES,
    PORTION_NBYTES,
    VERSION,
    PacketLimits,
    kind_of,
    nbytes_of,
    pack,
    parse,
    portions,
    segments,
)

__all__ = [
    "HEAD_NBYTES",
    "LENGTH_NBYTES",
    "MAX_BATCHED_NBYTES",
    "PORTION_NBYTES",
    "VERSION",
    "BatchedTensor",
    "EncodedTensor",
    "PacketLimits",
    "kind_of",
    "nbytes_of",
    "pack",
    "parse",
    "portions",
    "segments",
]
