"""Floats to the upper half of a float32 (bfloat16), and back.

Integer arithmetic on the bits, which compilers turn into vector code. Encoding finds the largest magnitude (as bits) in
the same pass, so that one comparison afterwards tells NaN, Inf and overflow: that makes it quicker than torch's cast
and a pass of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import FrameError
from thinwire.kernels.contract import Floats
from thinwire.kernels.numba.jit import float_of_bits, frozen, jit, magnitude_bits

Halves = NDArray[np.uint16]


def to_bfloat(values: Floats, halves: Halves) -> float:
    """Fills `halves` with the upper halves of float32, rounded half to even; returns the largest float32 magnitude.

    Where that is above `BFLOAT_MAX`, Inf or NaN, the halves mean nothing: the caller refuses them. float64 values are
    rounded to float32 first.
    """
    return _to_bfloat(frozen(values), halves)  # type: ignore[no-any-return]


BFLOAT_MAX = float(np.int32(0x7F7F7FFF).view(np.float32))
"""The largest float32 that does not round to Inf in bfloat16."""


def widen(payload: Any, *, out: Floats, accumulate: bool) -> None:
    """``out = v``, or ``out += v``, for 2·n bytes of bfloat16, little-endian, at any address.

    Args:
        payload: any buffer, trusted in nothing.
        out: float32[n] or float64[n].
        accumulate: add instead of store.

    Raises:
        FrameError: a value is NaN or Inf, or the number of bytes is not 2·n. `out` is untouched.

    Example:
        >>> out = np.empty(2, np.float32)
        >>> widen(bytes.fromhex("803f00c0"), out=out, accumulate=False)
        >>> out.tolist()
        [1.0, -2.0]
    """
    _widen(finite_halves(payload, size=out.size), accumulate, out)


def finite_halves(payload: Any, *, size: int, infinite: int = 0x7F80) -> Halves:
    """Returns a view of the payload, uint16[n], of floats whose Inf has these bits. Raises FrameError as `widen`."""
    nbytes = memoryview(payload).nbytes
    if nbytes != 2 * size:
        raise FrameError(f"{size} values take {2 * size} bytes, {nbytes} came")
    halves: Halves = frozen(np.frombuffer(payload, np.uint16))
    if _largest_16(halves) >= infinite:
        raise FrameError("the payload holds NaN or Inf")
    return halves


# Numba adds two int32 as int64: every step is cast back, so that compilers see the narrow arithmetic.


@jit
def _to_bfloat(values: Any, halves: Any) -> Any:
    largest = np.int32(0)
    for i in range(values.size):
        value = np.float32(values[i])
        bits = value.view(np.uint32)
        largest = max(largest, magnitude_bits(value))
        odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        halves[i] = np.uint16(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16))
    return float_of_bits(largest)


@jit
def _largest_16(halves: Any) -> Any:
    largest = np.uint16(0)
    for i in range(halves.size):
        largest = max(largest, np.uint16(halves[i] & np.uint16(0x7FFF)))
    return largest


@jit
def _widen(halves: Any, accumulate: bool, out: Any) -> None:
    kind = out.dtype.type
    for i in range(halves.size):
        value = kind(np.int32(np.int32(halves[i]) << np.int32(16)).view(np.float32))
        out[i] = out[i] + value if accumulate else value
