"""Floats in 16 bits, and back: IEEE half precision, and the upper half of a float32 (bfloat16).

Integer arithmetic on the bits, which compilers turn into vector code on any machine, where a conversion instruction may
not exist. Encoding finds the largest magnitude (as bits) in the same pass, so that one comparison afterwards tells NaN,
Inf and overflow: that makes it quicker than torch's cast and a pass of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import FrameError
from thinwire.kernels.contract import Floats
from thinwire.kernels.numba.jit import float_of_bits, frozen, jit, magnitude_bits

Halves = NDArray[np.uint16]

_MAGNITUDE, _SIGN = np.int32(0x7FFF), np.int32(0x8000)
_INFINITE = {"half": 0x7C00, "bfloat": 0x7F80}

# float32 → half: below 2**-14 halves are multiples of 2**-24, which is what adding 0.5 rounds to.
_HALF_NORMAL = np.int32((127 - 14) << 23)
_HALF_ROUND = np.int32(((15 - 127) << 23) + 0xFFF)  # the exponent's new bias, and just under half a unit
_HALF_NORMAL_64 = np.int64((1023 - 14) << 52)
_HALF_ROUND_64, _2_TO_28 = np.int64(((15 - 1023) << 52) + (1 << 41) - 1), np.int64((1023 + 28) << 52)
# half → float32: below 2**-14 the digits are put behind 2**-14, which is then taken away.
_TO_FLOAT_REBIAS, _2_TO_M14 = np.int32((127 - 15) << 23), np.int32((127 - 14) << 23)


def to_half(values: Floats, halves: Halves) -> float:
    """Fills `halves` with the bits of float16, rounded half to even; returns the largest magnitude of the values.

    Where that is 65,520 or more, Inf or NaN, the halves mean nothing: the caller refuses them.

    Args:
        values: float32[n] or float64[n], rounded once.
        halves: uint16[n], filled.

    Example:
        >>> halves = np.empty(3, np.uint16)
        >>> to_half(np.array([1.0, -0.1, 2.0**-24], np.float32), halves), halves.view(np.float16).tolist()[:2]
        (1.0, [1.0, -0.0999755859375])
    """
    kernel = _to_half_32 if values.dtype == np.float32 else _to_half_64
    return kernel(frozen(values), halves)  # type: ignore[no-any-return]


def to_bfloat(values: Floats, halves: Halves) -> float:
    """Fills `halves` with the upper halves of float32, rounded half to even; returns the largest float32 magnitude.

    Where that is above `BFLOAT_MAX`, Inf or NaN, the halves mean nothing: the caller refuses them. float64 values are
    rounded to float32 first.
    """
    return _to_bfloat(frozen(values), halves)  # type: ignore[no-any-return]


BFLOAT_MAX = float(np.int32(0x7F7F7FFF).view(np.float32))
"""The largest float32 that does not round to Inf in bfloat16."""


def widen(payload: Any, *, kind: str, out: Floats, accumulate: bool) -> None:
    """``out = v``, or ``out += v``, for 2·n bytes of 16-bit floats, little-endian, at any address.

    Args:
        payload: any buffer, trusted in nothing.
        kind: `"half"` (float16) or `"bfloat"`.
        out: float32[n] or float64[n].
        accumulate: add instead of store.

    Raises:
        FrameError: a value is NaN or Inf, or the number of bytes is not 2·n. `out` is untouched.

    Example:
        >>> out = np.empty(2, np.float32)
        >>> widen(bytes.fromhex("003c00c0"), kind="half", out=out, accumulate=False)
        >>> out.tolist()
        [1.0, -2.0]
    """
    halves = finite_halves(payload, kind=kind, size=out.size)
    (_widen_half if kind == "half" else _widen_bfloat)(halves, accumulate, out)


def finite_halves(payload: Any, *, kind: str, size: int) -> Halves:
    """Returns a view of the payload, uint16[n]. Raises FrameError as `widen` does, of which it is the check."""
    nbytes = memoryview(payload).nbytes
    if nbytes != 2 * size:
        raise FrameError(f"{size} values take {2 * size} bytes, {nbytes} came")
    halves: Halves = frozen(np.frombuffer(payload, np.uint16))
    if _largest_16(halves) >= _INFINITE[kind]:
        raise FrameError("the payload holds NaN or Inf")
    return halves


# Numba adds two int32 as int64: every step is cast back, so that compilers see the narrow arithmetic.


@jit
def _to_half_32(values: Any, halves: Any) -> Any:
    largest = np.int32(0)
    magic = np.float32(0.5)
    magic_bits = magic.view(np.int32)
    for i in range(values.size):
        bits = np.float32(values[i]).view(np.int32)
        x = magnitude_bits(values[i])
        largest = max(largest, x)
        odd = np.int32(np.int32(x >> np.int32(13)) & np.int32(1))
        normal = np.int32(np.int32(np.int32(x + _HALF_ROUND) + odd) >> np.int32(13))
        subnormal = np.int32(np.float32(float_of_bits(x) + magic).view(np.int32) - magic_bits)
        half = normal if x >= _HALF_NORMAL else subnormal
        halves[i] = np.uint16(half | np.int32(np.int32(bits >> np.int32(16)) & _SIGN))
    return float_of_bits(largest)


@jit
def _to_half_64(values: Any, halves: Any) -> Any:
    largest = np.int64(0)
    magic = np.int64(_2_TO_28).view(np.float64)
    for i in range(values.size):
        bits = np.float64(values[i]).view(np.int64)
        x = magnitude_bits(values[i])
        largest = max(largest, x)
        normal = (x + _HALF_ROUND_64 + ((x >> np.int64(42)) & np.int64(1))) >> np.int64(42)
        subnormal = np.float64(float_of_bits(x) + magic).view(np.int64) - _2_TO_28
        half = normal if x >= _HALF_NORMAL_64 else subnormal
        halves[i] = np.uint16(half | ((bits >> np.int64(48)) & np.int64(0x8000)))
    return float_of_bits(largest)


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
def _widen_half(halves: Any, accumulate: bool, out: Any) -> None:
    kind = out.dtype.type
    for i in range(halves.size):
        half = np.int32(halves[i])
        x = np.int32(np.int32(half & _MAGNITUDE) << np.int32(13))
        normal = np.int32(x + _TO_FLOAT_REBIAS)
        below = np.float32(np.int32(x + _2_TO_M14).view(np.float32) - np.int32(_2_TO_M14).view(np.float32))
        bits = normal if x >= np.int32(0x400 << 13) else below.view(np.int32)
        value = kind(np.int32(bits | np.int32(np.int32(half & _SIGN) << np.int32(16))).view(np.float32))
        out[i] = out[i] + value if accumulate else value


@jit
def _widen_bfloat(halves: Any, accumulate: bool, out: Any) -> None:
    kind = out.dtype.type
    for i in range(halves.size):
        value = kind(np.int32(np.int32(halves[i]) << np.int32(16)).view(np.float32))
        out[i] = out[i] + value if accumulate else value
