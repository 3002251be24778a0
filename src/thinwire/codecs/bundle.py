"""Small uncompressed tensors of one message share a frame: the bundle.

A frame has a head, a checksum, and checks on both sides, which cost more than a bias or a norm layer is worth: thirty
frames from each of four workers were half of a step in which nothing is computed. So tables that travel as they are
leave as members of one `fp32` frame, end to end; the message says how many values belong to each. Inside the cores a
member stands where a frame would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from thinwire import frames
from thinwire.codecs.base import Codec
from thinwire.codecs.decoding import open_parsed, unpack_flat
from thinwire.codecs.floats import FP32, require_finite
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import FrameError, NonFiniteError

MAX_NBYTES = 32 * 1024
"""A table's size up to which its own frame costs more than copying its values into a shared one."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One table's values, as float32, before or after their way in a shared frame.

    Args:
        values: float32[n], n ≥ 1, flat; nobody writes to them.
    """

    values: FloatArray

    def __len__(self) -> int:
        """Bytes that the values take, as for a frame."""
        return int(self.values.nbytes)

    def __eq__(self, other: object) -> bool:
        """Bit for bit."""
        return isinstance(other, Member) and self.values.tobytes() == other.values.tobytes()

    def unpack(self, out: FloatArray, *, accumulate: bool) -> None:
        """Stores the values in float32[n], or adds them."""
        if accumulate:
            out += self.values
        else:
            out[:] = self.values


Piece: TypeAlias = bytes | Member
"""What a message holds for a table: a frame of its own, or its part of the bundle."""


def joins(codec: Codec, shape: tuple[int, ...]) -> bool:
    """Whether tables of this codec and shape travel in bundles.

    >>> from thinwire.codecs.registry import codec
    >>> joins(codec("fp32"), (20,)), joins(codec("fp32"), (1000, 1000)), joins(codec("3lc"), (20,))
    (True, False, False)
    """
    return isinstance(codec, FP32) and codec == FP32() and 0 < 4 * math.prod(shape) <= MAX_NBYTES


def member(values: FloatArray, name: str) -> Member:
    """Returns a copy of float32[n] as a member. Raises NonFiniteError, with the name, where a value is NaN or Inf."""
    try:
        require_finite(values)
    except NonFiniteError as error:
        raise NonFiniteError(f"{name}: {error}") from None
    return Member(values.copy())


def join(members: Sequence[Member]) -> bytes:
    """Returns the one frame of some members, whose values are finite.

    >>> import numpy as np
    >>> frame = join([Member(np.ones(2, np.float32)), Member(np.zeros(3, np.float32))])
    >>> [part.values.tolist() for part in split(frame, [2, 3])]
    [[1.0, 1.0], [0.0, 0.0, 0.0]]
    """
    values = np.concatenate([each.values for each in members])
    return frames.write(FP32.id, "fp32", (values.size,), (), 0, values.data.cast("B"))


def split(frame: bytes, sizes: Sequence[int]) -> list[Member]:
    """Returns the members of a frame.

    Args:
        frame: any bytes.
        sizes: how many values belong to each, each at least 1.

    Raises:
        FrameError: no valid frame of as many finite float32 values.
    """
    parsed = frames.parse(frame, copy=False)
    count = sum(sizes)
    if (parsed.codec, parsed.dtype, parsed.shape, parsed.flags) != (FP32.id, "fp32", (count,), 0):
        raise FrameError(
            f"a bundle of {count} values came as {parsed.codec!r} of {parsed.dtype}, shape {parsed.shape}, flags "
            f"{parsed.flags:#06x}; it is an {FP32.id!r} frame of shape ({count},) without flags"
        )
    opened = open_parsed(parsed)  # from here on the payload is known to be as long as the shape says
    values = np.empty(count, np.float32)
    unpack_flat(opened, values, accumulate=False)
    ends = np.cumsum(sizes).tolist()
    return [Member(values[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
