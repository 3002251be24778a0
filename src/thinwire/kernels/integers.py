"""Whole numbers in a fixed number of bits each, little-endian: value i takes bits i·width … (i + 1)·width − 1.

Bit 0 is the lowest bit of the first byte. Padding bits behind the last value are 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import FrameError
from thinwire.kernels.contract import Bytes
from thinwire.kernels.jit import jit
from thinwire.kernels.magnitude import frozen

MAX_WIDTH = 32
_ROUNDS = 1.5 * 2**52
"""Adding and subtracting it rounds a float64 to a whole number, half to even."""


def packed_nbytes(size: int, width: int) -> int:
    """Bytes that `size` values of `width` bits take."""
    return -(-size * width // 8)


def pack_integers(values: NDArray[Any], *, offset: int = 0, width: int, words: NDArray[np.uint32]) -> Bytes:
    """Packs values + offset, each in 0 … 2**width − 1.

    Args:
        values: whole numbers of any type of at most 32 bits.
        offset: added first, so that signed numbers become unsigned.
        width: bits a value, 1 … 32.
        words: uint32[ceil(n·width / 32)] or more; holds the result.

    Returns:
        A view of `words`: uint8[ceil(n·width / 8)].

    Example:
        >>> pack_integers(np.array([1, 2, 3, -4]), offset=4, width=3, words=np.empty(1, np.uint32)).tolist()
        [245, 1]
    """
    _pack(frozen(values), offset, np.uint64(width), words)
    return words.view(np.uint8)[: packed_nbytes(values.size, width)]


def unpack_integers(packed: Any, *, offset: int = 0, width: int, out: NDArray[Any]) -> None:
    """Fills `out` with the packed numbers minus `offset`; `packed` has ceil(n·width / 8) bytes.

    `out` is int32, or uint16 for numbers that fit; int32 holds the bits of 32-bit numbers.

    Raises:
        FrameError: padding bits are set. The content of `out` is then undefined.
    """
    codes = np.frombuffer(packed, np.uint8)
    if _unpack(frozen(codes), offset, np.uint64(width), out):
        raise FrameError("padding bits behind the last value are set: the payload is damaged")


def round_to_integers(values: Any, *, scale: float, top: int, out: NDArray[np.int32]) -> None:
    """Fills `out` with round(v / scale · top), half to even, within ±top; scale > 0."""
    _round(frozen(values), float(scale), float(top), _ROUNDS, out)


def scale_integers(numbers: NDArray[Any], *, scale: float, top: int, out: Any, accumulate: bool) -> None:
    """``out = scale · numbers / top``, computed in float64; or added."""
    (_add if accumulate else _store)(frozen(numbers), float(scale), float(top), out)


@jit
def _pack(values: Any, offset: int, width: Any, words: Any) -> None:
    held, filled, at = np.uint64(0), np.uint64(0), 0
    for i in range(values.size):
        held |= np.uint64(np.int64(values[i]) + offset) << filled
        filled += width
        if filled >= np.uint64(32):
            words[at] = np.uint32(held & np.uint64(0xFFFFFFFF))
            held >>= np.uint64(32)
            filled -= np.uint64(32)
            at += 1
    if filled:
        words[at] = np.uint32(held)


@jit
def _unpack(packed: Any, offset: int, width: Any, out: Any) -> Any:
    """Whether padding bits are set."""
    held, filled, at = np.uint64(0), np.uint64(0), 0
    mask = (np.uint64(1) << width) - np.uint64(1)
    for i in range(out.size):
        while filled < width:
            held |= np.uint64(packed[at]) << filled
            filled += np.uint64(8)
            at += 1
        out[i] = np.int32(np.int64(held & mask) - offset)
        held >>= width
        filled -= width
    return held != np.uint64(0)


@jit
def _round(values: Any, scale: float, top: float, rounds: float, out: Any) -> None:
    for i in range(values.size):
        k: Any = np.float64(values[i]) / scale * top
        k = k if k < top else top
        k = k if k > -top else -top
        out[i] = np.int32((k + rounds) - rounds)


@jit
def _store(numbers: Any, scale: float, top: float, out: Any) -> None:
    for i in range(numbers.size):
        out[i] = scale * (np.float64(numbers[i]) / top)


@jit
def _add(numbers: Any, scale: float, top: float, out: Any) -> None:
    kind = out.dtype.type
    for i in range(numbers.size):
        out[i] += kind(scale * (np.float64(numbers[i]) / top))
