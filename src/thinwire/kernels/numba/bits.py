"""Signs, one bit a value, eight to a byte with the first in the highest bit (as `numpy.packbits`).

A block is packed at a time: comparisons first, then eight flags become a byte. With a residual, the same loop leaves v
minus the decoded value of its bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.jit import frozen, jit, wide_vectors

_GATHER, _56 = np.uint64(0x8040201008040201), np.uint64(56)
_BLOCK = 8192


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
        residual: updated to v − (high or low); None: no residual.
        residual_scale: the residual is multiplied by it first.
        low, high: decoded values of cleared and set bits.

    Example:
        >>> bits = np.empty(1, np.uint8)
        >>> pack_signs(np.array([0.5, -0.2, 0.0, -0.6, 0.1], np.float32), bits=bits)
        >>> bits.tolist()
        [168]
    """
    kind = values.dtype.type
    flags = np.empty(min(_BLOCK, 8 * bits.size), np.uint8)
    words = flags.view(np.uint64)
    _pack_signs(frozen(values), residual, kind(residual_scale), kind(low), kind(high), flags, words, bits)


def unpack_signs(bits: Bytes, *, low: float, high: float, out: Any, accumulate: bool) -> None:
    """Writes (or adds) `high` where a bit is set and `low` where it is not into out[n]; `bits` has ceil(n / 8)."""
    kind = out.dtype.type
    table = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1), kind(high), kind(low))
    _unpack_signs(frozen(bits), table, accumulate, out)


@jit
def _pack_signs(values: Any, residual: Any, scale: Any, low: Any, high: Any, flags: Any, words: Any, bits: Any) -> None:
    for start in range(0, values.size, _BLOCK):
        stop = min(start + _BLOCK, values.size)
        held = None if residual is None else residual[start:stop]
        _flag(values[start:stop], held, scale, low, high, flags)
        made = bits[start // 8 : (stop + 7) // 8]
        flags[stop - start : 8 * made.size] = 0
        _gather(words, made)


@jit
def _flag(values: Any, residual: Any, scale: Any, low: Any, high: Any, flags: Any) -> None:
    wide_vectors()
    for i in range(values.size):
        v = values[i] if residual is None else scale * residual[i] + values[i]
        set_ = v >= 0
        if residual is not None:
            residual[i] = v - (high if set_ else low)
        flags[i] = np.uint8(set_)


@jit
def _gather(words: Any, bits: Any) -> None:
    """Packs eight flags, read as one word, into a byte by one multiplication."""
    wide_vectors()
    for i in range(bits.size):
        bits[i] = np.uint8((words[i] * _GATHER) >> _56)


@jit
def _unpack_signs(bits: Any, table: Any, accumulate: bool, out: Any) -> None:
    """Writes a table row for each byte. A row is read whole before it is written, so that it moves in one register."""
    whole = out.size // 8
    for i in range(whole):
        code, at = bits[i], 8 * i
        v0, v1, v2, v3 = table[code, 0], table[code, 1], table[code, 2], table[code, 3]
        v4, v5, v6, v7 = table[code, 4], table[code, 5], table[code, 6], table[code, 7]
        if accumulate:
            v0, v1, v2, v3 = v0 + out[at], v1 + out[at + 1], v2 + out[at + 2], v3 + out[at + 3]
            v4, v5, v6, v7 = v4 + out[at + 4], v5 + out[at + 5], v6 + out[at + 6], v7 + out[at + 7]
        out[at], out[at + 1], out[at + 2], out[at + 3] = v0, v1, v2, v3
        out[at + 4], out[at + 5], out[at + 6], out[at + 7] = v4, v5, v6, v7
    for at in range(8 * whole, out.size):
        value = table[bits[at // 8], at % 8]
        out[at] = out[at] + value if accumulate else value
