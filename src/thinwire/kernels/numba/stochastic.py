"""Random numbers: uniform draws, and ternary quantisation (TernGrad, equations 1–3).

The draw of value i depends only on i and the key. A 32-bit counter passes through two published bijective mixers
(Wellons' `lowbias32` and `triple32`); one word of the key enters before the first mixer, the other between them. The
arithmetic is on integers: every machine draws the same numbers, and a decoder with the key repeats the encoder's draws.
The numbers repeat after 2**32 values.

    t = sign(v) with probability min(|v|, limit) / scale, else 0

Digits t + 1 are packed five to a byte (base-3^5) or four (two bits each, the first value in the low bits). A value is
kept where its magnitude exceeds u·scale, u uniform on multiples of 2**-24 in [0, 1): a value of the full scale is
always kept, a zero never.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import FrameError
from thinwire.kernels.contract import UNIT, Bytes, Key
from thinwire.kernels.numba.jit import frozen, jit, wide_vectors

_WEIGHTS = {"base243": np.array([81, 27, 9, 3, 1], np.uint8), "2bit": np.array([1, 4, 16, 64], np.uint8)}


def high_bits(key: Key, first: int, out: NDArray[np.int32]) -> None:
    """Fills `out` with the 24 high bits of the draws first, first + 1, …"""
    fill_draws(*start_of(key, first), out)


def start_of(key: Key, first: int = 0) -> tuple[Any, Any]:
    """Returns the arguments of `draw` and `fill_draws`: the counter of value `first`, and the second word of the key.

    Example:
        >>> start_of((2**32 - 1, 7), first=3)
        (np.uint32(2), np.uint32(7))
    """
    return np.uint32((first + key[0]) & 0xFFFFFFFF), np.uint32(key[1])


@jit
def fill_draws(start: Any, key1: Any, out: Any) -> None:
    """Fills int32[n] with draws from counter `start` on."""
    for i in range(out.size):
        out[i] = draw(np.uint32(start + np.uint32(i)), key1)


@jit
def draw(counter: Any, key1: Any) -> Any:
    """Returns the 24 high bits of one draw, int32."""
    x = np.uint32((counter ^ (counter >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    x = np.uint32(x ^ (x >> np.uint32(16)) ^ key1)
    x = np.uint32((x ^ (x >> np.uint32(17))) * np.uint32(0xED5AD4BB))
    x = np.uint32((x ^ (x >> np.uint32(11))) * np.uint32(0xAC4C1B51))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB))
    x = np.uint32(x ^ (x >> np.uint32(14)))
    return np.int32(x >> np.uint32(8))


def pack_stochastic(values: Any, *, scale: float, limit: float, key: Key, packing: str, codes: Bytes) -> int:
    """Fills `codes` with stochastic trits of `values`; the padding is quantised zeros.

    Args:
        values: float32[n] or float64[n], finite; never written.
        scale: the value of trit 1.
        limit: magnitudes are clipped to it; at most `scale`.
        key: of the random numbers, two words.
        packing: "base243" (five trits a byte) or "2bit" (four).
        codes: uint8[ceil(n / 5)] or uint8[ceil(n / 4)].

    Returns:
        The number of trits that are not zero.

    Example:
        >>> codes = np.empty(1, np.uint8)
        >>> values = np.array([1.0, 0.0, -1.0], np.float32)
        >>> pack_stochastic(values, scale=1.0, limit=1.0, key=(1, 2), packing="2bit", codes=codes), codes.tolist()
        (2, [70])
    """
    kind, weights = values.dtype.type, _WEIGHTS[packing]
    lift, step = _steps(scale, kind)
    digits = np.ones((codes.size, weights.size), np.uint8)
    given = frozen(values), *start_of(key), kind(limit), kind(lift), kind(step)
    num_nonzero = int(_draw_trits(*given, digits.reshape(-1)))
    np.matmul(digits, weights, out=codes)
    return num_nonzero


def _steps(scale: float, kind: Any) -> tuple[float, float]:
    """Returns (lift, step): u·scale·lift = (24-bit draw)·step; the power of two `lift` keeps products normal."""
    tiny = 0.0 < scale < float(np.finfo(kind).tiny) * 2.0**48
    lift = 2.0 ** (64 if kind is np.float32 else 512) if tiny else 1.0
    return lift, scale * lift * UNIT


@jit
def _draw_trits(values: Any, start: Any, key1: Any, limit: Any, lift: Any, step: Any, digits: Any) -> Any:
    """Fills digits t + 1; returns how many are not 1. Drawing in this loop hides the wait for memory."""
    wide_vectors()
    kind = values.dtype.type
    num_nonzero = np.int64(0)
    for i in range(values.size):
        u = kind(draw(np.uint32(start + np.uint32(i)), key1)) * step
        v = values[i]
        v = v if v < limit else limit
        v = (v if v > -limit else -limit) * lift
        above, below = v > u, v < -u
        num_nonzero += above | below
        digits[i] = np.uint8(1) + np.uint8(above) - np.uint8(below)
    return num_nonzero


def unpack_two_bit(codes: Bytes, *, scale: float, out: Any, accumulate: bool) -> None:
    """``out = scale * t``, or ``out += scale * t``, of two-bit trits; uint8[ceil(n / 4)] for out[n].

    Raises:
        FrameError: a pair of bits is 3, which is not a trit. `out` is untouched.
    """
    if np.any(codes & (codes >> 1) & 0x55):
        raise FrameError("two bits of a trit are both set: the payload is damaged")
    zero = out.dtype.type(-0.0 if accumulate else 0.0)
    worth = np.array([-scale, zero, scale, zero], out.dtype)
    table = worth[np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3]
    values = np.take(table, codes, axis=0).reshape(-1)[: out.size]
    np.add(out, values, out=out) if accumulate else np.copyto(out, values)


def sample_of(values: Any, size: int) -> Any:
    """Returns `size` of the values, one from a random place of each of equal stretches; or all values.

    The places depend only on the two sizes, so that equal tensors give equal samples on every machine.
    """
    if size >= values.size:
        return values
    edges, random = np.arange(size + 1) * values.size // size, np.empty(size, np.int32)
    high_bits((0, 0), 0, random)
    return values[edges[:-1] + (random * np.diff(edges) >> 24)]
