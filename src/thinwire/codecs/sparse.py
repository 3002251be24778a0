"""Positions and values of the values sent: the payload of `topk`, which other schemes may share.

Positions are a bitmap (one bit a value of the tensor) or indices (for each value sent, the bits of the last index);
`auto` takes the shorter. The values follow in full precision.

    bitmap:   ceil(n / 8) bytes, first value in the highest bit · values
    index:    count (varint) · ascending indices of ceil(log2 n) bits, little-endian · values · zeros

The zeros behind indices make a payload at least one byte per 4,096 values long, so that a few bytes cannot claim a
tensor that fills the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs.scheme import Explained, Payload, Scheme, Sent
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import FloatArray, compute_dtype, put_some
from thinwire.errors import ConfigError, FrameError
from thinwire.frames import Flags, Frame
from thinwire.frames.layout import pack_varint, parse_varint
from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.integers import MAX_WIDTH, pack_integers, packed_nbytes, unpack_integers
from thinwire.kernels.numba.jit import max_magnitude

BITMAP = int(Flags.OPTION_A)
"""Positions are a bitmap; without it, indices."""

VALUES_PER_BYTE = 4096
Positions = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Sparse(Scheme):
    """A scheme that sends some of the values exactly.

    Args:
        positions: `"bitmap"`, `"index"` (tensors of up to 2**32 values), or `"auto"`, the shorter of the two.
    """

    keeps_residual: ClassVar[bool] = True
    sends_some: ClassVar[bool] = True
    option_flags: ClassVar[int] = BITMAP
    num_scales: ClassVar[int | None] = 0

    positions: Literal["auto", "bitmap", "index"] = "auto"

    def check_positions(self, size: int) -> None:
        """Raises ConfigError where `positions="index"` cannot reach the last of `size` values."""
        if self.positions == "index" and index_width(size) > MAX_WIDTH:
            raise ConfigError(f"{self.id}: {size} values are too many for positions='index'; take 'bitmap'")

    def takes_bitmap(self, size: int, count: int, body_nbytes: int) -> bool:
        """Whether the positions of `count` among `size` values are sent as a bitmap."""
        self.check_positions(size)
        bitmap_nbytes, index_nbytes = _bitmap_nbytes(size) + body_nbytes, _index_nbytes(size, count, body_nbytes)
        shorter = bitmap_nbytes < index_nbytes or index_width(size) > MAX_WIDTH
        return self.positions == "bitmap" or (self.positions == "auto" and shorter)

    def with_bitmap(self, bitmap: Bytes, body: Bytes, space: Scratch) -> Payload:
        """Returns a payload with the positions as a bitmap."""
        payload = space.array("sparse.payload", bitmap.size + body.size, np.uint8)
        payload[: bitmap.size] = bitmap
        payload[bitmap.size :] = body
        return Payload(payload, flags=BITMAP)

    def with_indices(self, size: int, positions: Positions, body: Bytes, space: Scratch) -> Payload:
        """Returns a payload with the positions as indices, for a tensor of `size` values."""
        count = positions.size
        words = space.array("sparse.words", -(-count * index_width(size) // 32), np.uint32)
        packed = pack_integers(positions, width=index_width(size), words=words)
        payload = np.zeros(_index_nbytes(size, count, body.size), np.uint8)
        told = np.concatenate((np.frombuffer(pack_varint(count), np.uint8), packed, body))
        payload[: told.size] = told
        return Payload(payload)

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        positions, values = cls.read(frame, space)
        put_some(values, positions, out, accumulate)

    @classmethod
    def read(cls, frame: Frame, space: Scratch) -> tuple[Positions, FloatArray]:
        """Returns the ascending positions and the values that were sent, both checked. Raises FrameError."""
        positions, rest = _read_positions(frame, space)
        count = positions.size
        body = cls.body_nbytes(frame, count)
        head = len(frame.payload) - len(rest)
        exact = head + body if frame.flags & BITMAP else _index_nbytes(frame.size, count, body)
        if len(frame.payload) != exact or any(rest[body:]):  # only the zeros behind indices may follow
            raise FrameError(f"{frame.codec}: {count} values take {body} bytes, {len(rest)} came")
        return positions, cls.values_of(frame, rest[:body], count)

    @classmethod
    def body_nbytes(cls, frame: Frame, count: int) -> int:
        """Returns the bytes of the values sent."""
        return count * frame.itemsize

    @classmethod
    def values_of(cls, frame: Frame, body: memoryview, count: int) -> FloatArray:
        """Returns the values sent. Raises FrameError."""
        values = np.frombuffer(body, np.dtype(compute_dtype(frame.dtype)).newbyteorder("<"))
        if not np.isfinite(max_magnitude(values)):
            raise FrameError(f"{frame.codec}: a value is NaN or Inf")
        return values

    @classmethod
    def sent(cls, frame: Frame, space: Scratch) -> Sent:
        positions, values = cls.read(frame, space)
        return Sent(positions.copy(), values.copy())

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        bitmap = bool(frame.flags & BITMAP)
        positions, values = cls.read(frame, space)
        return {
            "positions": (
                "bitmap" if bitmap else "index",
                "OPTION_A: one bit a value of the tensor; without it, a count and ascending indices",
            ),
            "bits per position": (1 if bitmap else index_width(frame.size), "of each value, or of each value sent"),
            "values sent": (int(positions.size), f"of {frame.size}; the others decode to 0"),
            "bits per value sent": (8 * values.itemsize, "the value in full precision"),
        }

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        body = cls.body_nbytes(frame, frame.size)
        if frame.flags & BITMAP:
            return _bitmap_nbytes(frame.size) + body
        return _index_nbytes(frame.size, frame.size, body)

    @classmethod
    def min_payload_nbytes(cls, frame: Frame) -> int:
        """With indices, the exact size for the declared count."""
        if frame.flags & BITMAP:
            return _bitmap_nbytes(frame.size)
        count, _ = _read_count(frame)
        return _index_nbytes(frame.size, count, cls.body_nbytes(frame, count))


def index_width(size: int) -> int:
    """Returns the bits of an index."""
    return max(1, (size - 1).bit_length())


def _bitmap_nbytes(size: int) -> int:
    return -(-size // 8)


def _index_nbytes(size: int, count: int, body_nbytes: int) -> int:
    """Returns the bytes of a payload with indices."""
    told = len(pack_varint(count)) + packed_nbytes(count, index_width(size)) + body_nbytes
    return max(told, size // VALUES_PER_BYTE)


def _read_count(frame: Frame) -> tuple[int, int]:
    """Returns the number of values sent, and the offset of their indices."""
    if index_width(frame.size) > MAX_WIDTH:
        raise FrameError(f"{frame.codec}: indices of {frame.size} values take more than {MAX_WIDTH} bits")
    count, at = parse_varint(memoryview(frame.payload), 0, "the number of values")
    if count > frame.size:
        raise FrameError(f"{frame.codec}: {count} of {frame.size} values were sent")
    return count, at


def _read_positions(frame: Frame, space: Scratch) -> tuple[Positions, memoryview]:
    """Returns the checked positions, and the bytes behind them."""
    payload = memoryview(frame.payload)
    if frame.flags & BITMAP:
        at = _bitmap_nbytes(frame.size)
        positions = np.flatnonzero(np.unpackbits(np.frombuffer(payload[:at], np.uint8)))
        if positions.size and int(positions[-1]) >= frame.size:
            raise FrameError(f"{frame.codec}: the bitmap marks values behind the last")
        return positions, payload[at:]
    count, at = _read_count(frame)
    end = at + packed_nbytes(count, index_width(frame.size))
    raw = space.array("sparse.indices", count, np.int32)
    unpack_integers(payload[at:end], width=index_width(frame.size), out=raw)
    positions = raw.view(np.uint32).astype(np.int64)
    if count and (int(positions[-1]) >= frame.size or np.any(positions[1:] <= positions[:-1])):
        raise FrameError(f"{frame.codec}: indices are not ascending, or past the last of {frame.size} values")
    return positions, payload[end:]
