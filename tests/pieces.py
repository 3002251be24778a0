"""Tensors of a batch as frames of their own, for tests that ask what was said and not how it travelled."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.codecs import codec
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.schema import Delta, Message, Plan, Push

PLAIN = codec("fp32")


def as_frame(piece: EncodedTensor, shape: tuple[int, ...]) -> bytes:
    """The frame that would have been sent; a batched tensor does not know its table's shape."""
    return PLAIN.encode(piece.values.reshape(shape)) if isinstance(piece, BatchedTensor) else bytes(piece)


def as_frames(plan: Plan, message: Message, pieces: Sequence[EncodedTensor]) -> tuple[bytes, ...]:
    """As `as_frame`, for all of a message."""
    if not isinstance(message, Push | Delta):
        return tuple(bytes(piece) for piece in pieces if not isinstance(piece, BatchedTensor))
    shapes = [plan.tables[table].shape for table in message.tables]
    return tuple(as_frame(piece, shape) for piece, shape in zip(pieces, shapes, strict=True))
