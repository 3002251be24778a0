"""One bit a value: v ≥ 0 or not, eight to a byte with the first value in the highest bit (as `numpy.packbits`).

A block of flags at a time: comparisons first, then eight flags, read as a 64-bit word, become a byte by one
multiplication. With a residual, the same loop leaves v minus what the bit will be decoded to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.jit import jit, wide_vectors
from thinwire.kernels.numba.magnitude import frozen

_BLOCK = 8192
_GATHER = np.uint64(0x8040201008040201)
_56 = np.uint64(56)


def pack_signs(
    values: Any,
    *,
    bits: Bytes,
    residual: Any = None,
    residual_scale: float = 1.0,
    low: float = 0.0,
    high: float = 0.0,
) -> None:
    """Fills `bits` with one bit a value, set where v = residual_scale·residual + values is at least zero.

    Args:
        values: float32[n] or float64[n], finite; never written.
        bits: uint8[ceil(n / 8)], filled; padding bits are 0.
        residual: updated to v − (high or low); None: nothing is kept.
        residual_scale: what the residual is multiplied by first.
        low, high: what cleared and set bits are decoded to.

    Example:
        >>> bits = np.empty(1, np.uint8)
        >>> pack_signs(np.array([0.5, -0.2, 0.0, -0.6, 0.1], np.float32), bits=bits)
        >>> bits.tolist()
        [168]
    """
    kind = values.dtype.type
    flags = np.empty(min(_BLOCK, 8 * bits.size), np.uint8)
    if residual is None:
        _pack_values(frozen(values), flags, flags.view(np.uint64), bits)
    else:
        _pack_sums(
            frozen(values), residual, kind(residual_scale), kind(low), kind(high), flags, flags.view(np.uint64), bits
        )


def unpack_signs(bits: Bytes, *, low: float, high: float, out: Any, accumulate: bool) -> None:
    """Writes (or adds) `high` where a bit is set and `low` where it is not into out[n]; `bits` has ceil(n / 8)."""
    kind = out.dtype.type
    table = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1), kind(high), kind(low))
    (_add if accumulate else _store)(frozen(bits), table, out)


@jit
def _pack_values(values: Any, flags: Any, words: Any, bits: Any) -> None:
    for start in range(0, values.size, _BLOCK):
        size = min(_BLOCK, values.size - start)
        _flags_of_values(values[start : start + size], flags)
        _gather(flags, words, size, bits[start // 8 : (start + size + 7) // 8])


@jit
def _pack_sums(values: Any, residual: Any, scale: Any, low: Any, high: Any, flags: Any, words: Any, bits: Any) -> None:
    for start in range(0, values.size, _BLOCK):
        stop = min(start + _BLOCK, values.size)
        _flags_of_sums(values[start:stop], residual[start:stop], scale, low, high, flags)
        _gather(flags, words, stop - start, bits[start // 8 : (stop + 7) // 8])


@jit
def _flags_of_values(values: Any, flags: Any) -> None:
    wide_vectors()
    for i in range(values.size):
        flags[i] = np.uint8(values[i] >= 0)


@jit
def _flags_of_sums(values: Any, residual: Any, scale: Any, low: Any, high: Any, flags: Any) -> None:
    wide_vectors()
    for i in range(values.size):
        v = scale * residual[i] + values[i]
        set_ = v >= 0
        residual[i] = v - (high if set_ else low)
        flags[i] = np.uint8(set_)


@jit
def _gather(flags: Any, words: Any, known: int, bits: Any) -> None:
    wide_vectors()
    flags[known : 8 * bits.size] = 0
    for i in range(bits.size):
        bits[i] = np.uint8((words[i] * _GATHER) >> _56)


@jit
def _store(bits: Any, table: Any, out: Any) -> None:
    whole = out.size // 8
    for i in range(whole):
        code, at = bits[i], 8 * i
        v0, v1, v2, v3 = table[code, 0], table[code, 1], table[code, 2], table[code, 3]
        v4, v5, v6, v7 = table[code, 4], table[code, 5], table[code, 6], table[code, 7]
        out[at], out[at + 1], out[at + 2], out[at + 3] = v0, v1, v2, v3
        out[at + 4], out[at + 5], out[at + 6], out[at + 7] = v4, v5, v6, v7
    for at in range(8 * whole, out.size):
        out[at] = table[bits[at // 8], at % 8]


@jit
def _add(bits: Any, table: Any, out: Any) -> None:
    whole = out.size // 8
    for i in range(whole):
        code, at = bits[i], 8 * i
        v0, v1, v2, v3 = out[at], out[at + 1], out[at + 2], out[at + 3]
        v4, v5, v6, v7 = out[at + 4], out[at + 5], out[at + 6], out[at + 7]
        v0 += table[code, 0]
        v1 += table[code, 1]
        v2 += table[code, 2]
        v3 += table[code, 3]
        v4 += table[code, 4]
        v5 += table[code, 5]
        v6 += table[code, 6]
        v7 += table[code, 7]
        out[at], out[at + 1], out[at + 2], out[at + 3] = v0, v1, v2, v3
        out[at + 4], out[at + 5], out[at + 6], out[at + 7] = v4, v5, v6, v7
    for at in range(8 * whole, out.size):
        out[at] += table[bits[at // 8], at % 8]
