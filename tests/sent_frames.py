"""Tensors of a batch as frames of their own, for tests that ask what was said and not how it travelled."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.codecs import codec
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.schema import Delta, Message, Plan, Push

PLAIN = codec("fp32")


def as_frame(tensor: EncodedTensor, shape: tuple[int, ...]) -> bytes:
    """The frame that would have been sent; a batched tensor does not know its table's shape."""
    return PLAIN.encode(tensor.values.reshape(shape)) if isinstance(tensor, BatchedTensor) else bytes(tensor)


def as_frames(plan: Plan, message: Message, tensors: Sequence[EncodedTensor]) -> tuple[bytes, ...]:
    """As `as_frame`, for all of a message."""
    if not isinstance(message, Push | Delta):
        return tuple(bytes(tensor) for tensor in tensors if not isinstance(tensor, BatchedTensor))
    shapes = [plan.tables[table].shape for table in message.tables]
    return tuple(as_frame(tensor, shape) for tensor, shape in zip(tensors, shapes, strict=True))
