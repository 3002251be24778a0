"""Small uncompressed tensors of one message share a frame: the batch.

A frame's head, checksum and checks cost more than the values of a bias: thirty frames from each of four workers took
half of an empty step. Uncompressed tensors are therefore concatenated in one `fp32` frame, or a `bf16` frame if all of
them are rounded to bfloat16; the message holds each tensor's number of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from thinwire import frames
from thinwire.errors import FrameError, NonFiniteError

MAX_BATCHED_NBYTES = 32 * 1024
"""Largest tensor for which a separate frame costs more than copying its values into a shared one."""

CODEC, NARROW = "fp32", "bf16"
"""The codecs of the shared frame: float32 or float64 values, or the upper halves of float32."""

_DTYPES = {np.dtype(np.float32): "fp32", np.dtype(np.float64): "fp64"}


@dataclass(frozen=True, slots=True, eq=False)
class BatchedTensor:
    """One tensor's values in a shared frame."""

    values: NDArray[Any]
    """float32[n] or float64[n], n ≥ 1, flat, read only."""
    narrow: bool = False
    """Whether they are bfloat16 numbers; a batch of only those takes 16 bits a value."""

    @classmethod
    def of(cls, values: NDArray[Any], name: str, *, narrow: bool = False) -> Self:
        """Returns a copy of float32[n] or float64[n]; `narrow` rounds float32 to bfloat16, half to even.

        Raises:
            NonFiniteError: a value of the tensor `name` is NaN or Inf, or rounds to Inf.

        Example:
            >>> BatchedTensor.of(np.array([1.0, 1.003, 1.0079], np.float32), "w", narrow=True).values.tolist()
            [1.0, 1.0, 1.0078125]
        """
        kept = rounded(values) if narrow else values.copy()
        if not np.isfinite(kept).all():
            raise NonFiniteError(f"{name}: holds NaN or Inf; nothing was encoded and no state was changed")
        return cls(kept, narrow)

    def __len__(self) -> int:
        """Returns the bytes of the values, as for a frame."""
        return int(self.values.nbytes) // (2 if self.narrow else 1)

    def __eq__(self, other: object) -> bool:
        """Bit for bit."""
        return isinstance(other, BatchedTensor) and self.values.tobytes() == other.values.tobytes()

    def fits(self, size: int, dtype: str) -> bool:
        """Whether these are `size` numbers of `dtype`, fp32 or fp64."""
        return self.values.size == size and _DTYPES[self.values.dtype] == dtype

    def unpack(self, out: NDArray[Any], *, accumulate: bool) -> None:
        """Stores the values in an array of n values, or adds them."""
        if accumulate:
            out += self.values
        else:
            out[:] = self.values


EncodedTensor: TypeAlias = bytes | memoryview | BatchedTensor
"""A table's values in a message: a separate frame, or a part of the message's batch."""


def join(tensors: Sequence[BatchedTensor]) -> bytes:
    """Returns one frame with the finite values of tensors of one dtype.

    >>> import numpy as np
    >>> frame = join([BatchedTensor(np.ones(2, np.float32)), BatchedTensor(np.zeros(3, np.float32))])
    >>> [part.values.tolist() for part in split(frame, [2, 3])]
    [[1.0, 1.0], [0.0, 0.0, 0.0]]
    """
    values = np.concatenate([each.values for each in tensors])
    if all(each.narrow for each in tensors):
        halves = (values.view(np.uint32) >> 16).astype("<u2")
        return frames.write(NARROW, "fp32", (values.size,), (), 0, halves.data.cast("B"))
    return frames.write(CODEC, _DTYPES[values.dtype], (values.size,), (), 0, values.data.cast("B"))


def split(frame: bytes | memoryview, sizes: Sequence[int], dtype: DTypeLike = np.float32) -> list[BatchedTensor]:
    """Returns the tensors of a frame, of `sizes` values each, as views of one copy of its values.

    Raises:
        FrameError: not a valid frame of as many finite values of that dtype, float32 or float64.
    """
    parsed, count, dtype = frames.parse(frame, copy=False), sum(sizes), np.dtype(dtype)
    narrow = parsed.codec == NARROW and dtype == np.float32
    found = CODEC if narrow else parsed.codec, parsed.dtype, parsed.shape, parsed.flags
    if found != (CODEC, _DTYPES[dtype], (count,), 0):
        raise FrameError(
            f"a batch of {count} values came as {parsed.codec!r} of {parsed.dtype}, shape {parsed.shape}, flags "
            f"{parsed.flags:#06x}; it is an {CODEC!r} frame of {_DTYPES[dtype]}, shape ({count},), without flags"
        )
    nbytes = count * (2 if narrow else dtype.itemsize)
    if len(parsed.payload) != nbytes or parsed.scales:
        raise FrameError(
            f"a batch of {count} values takes {nbytes} payload bytes and no scales; "
            f"{len(parsed.payload)} bytes and {len(parsed.scales)} scales came"
        )
    if narrow:
        values = (np.frombuffer(parsed.payload, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(parsed.payload, dtype).copy()  # the payload may be unaligned in the packet
    if not np.isfinite(values).all():  # our senders refuse them, and they would spread over the model
        raise FrameError("the payload holds NaN or Inf")
    return [BatchedTensor(values[end - size : end], narrow) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def rounded(values: NDArray[Any]) -> NDArray[Any]:
    """Returns float32 rounded to the nearest bfloat16, half to even; NaN and what rounds to Inf are not finite."""
    bits = values.view(np.uint32).astype(np.uint64)
    nearest: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(values), values, nearest)
