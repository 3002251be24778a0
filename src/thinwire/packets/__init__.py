"""Messages ↔ bytes: one versioned, length-prefixed packet for both modes. No torch, no sockets."""

from thinwire.packets.batch import MAX_BATCHED_NBYTES, BatchedTensor, EncodedTensor
from thinwire.packets.layout import HEAD_NBYTES, VERSION
from thinwire.packets.packet import kind_of, pack, parse, segments

__all__ = [
    "HEAD_NBYTES",
    "MAX_BATCHED_NBYTES",
    "VERSION",
    "BatchedTensor",
    "EncodedTensor",
    "kind_of",
    "pack",
    "parse",
    "segments",
]
