"""Floats to base-3^5 codes and back (3LC, sections 3.1 and 3.2), and the scratch memory of a 3LC call.

A code is five neighbouring trits, ``81*d0 + 27*d1 + 9*d2 + 3*d3 + d4`` with d = trit + 1.

Packing takes a block of 4,096 codes at a time: one loop turns values into digits 0, 1, 2 (two comparisons with the
threshold, no division) and leaves the rest in the residual; then the digits, still in the cache, become codes.

To unpack, a table holds, for each code, its five values multiplied by the scale; a code is one table row, written at
its place (the next row overwrites the three fillers behind it). To add, a block of values is written to scratch memory
and added from the cache. The zero of the table is then -0.0: adding it changes no bit of any number, +0.0 and -0.0
included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Bytes, Floats
from thinwire.kernels.numba.jit import jit, wide_vectors, words_apart

BLOCK_CODES = 4096  # codes per block: 20,480 values, so that a block's digits stay in the first-level cache
SLACK = 64  # bytes behind the last code: kernels write whole words
_PLACES = np.array([81, 27, 9, 3, 1, 1, 1, 1])
_TRITS = ((np.arange(256)[:, None] // _PLACES % 3).ravel() - 1).astype(np.int8)  # five a code, and three fillers
_TABLE = 8 * 256
_UNPACKED = 1024  # codes that are laid out before they are added


class GrowingBuffer:
    """A byte buffer with the views that kernels write through.

    Attributes:
        bytes: uint8[capacity + SLACK].
        words: the same memory as uint64, eight bytes apart.
        words_at: the same memory as uint64 starting at *every* byte: ``words_at[k] = w`` stores bytes k..k+7.
    """

    def __init__(self) -> None:
        self._resize(0)

    def _resize(self, capacity: int) -> None:
        self.bytes: Bytes = np.zeros((capacity + SLACK + 7) // 8 * 8, dtype=np.uint8)
        self.words: NDArray[np.uint64] = self.bytes.view(np.uint64)
        self.words_at = words_apart(self.bytes, 1)

    def reserve(self, capacity: int) -> None:
        """Makes room for at least `capacity` bytes; a new buffer loses the content."""
        if self.bytes.size < capacity + SLACK:
            self._resize(capacity)


class Workspace:
    """The scratch buffers of one caller. Not thread safe: one per thread, or per owner that takes turns.

    Example:
        >>> import numpy as np
        >>> from thinwire.kernels.numba import encode_ternary
        >>> workspace = Workspace()
        >>> scale, payload = encode_ternary(np.zeros(1000, np.float32), sparsity=1.0, workspace=workspace)
        >>> payload.size
        15
    """

    def __init__(self) -> None:
        self.payload = GrowingBuffer()
        self.codes = GrowingBuffer()
        self.digits: Bytes = np.zeros(5 * BLOCK_CODES + 8, dtype=np.uint8)
        self.words: NDArray[np.uint64] = np.zeros((3, BLOCK_CODES // 8 + 1), dtype=np.uint64)
        self._floats = {np.dtype(t): np.zeros(_TABLE + 5 * _UNPACKED + 3, t) for t in (np.float32, np.float64)}

    def floats(self, dtype: np.dtype[Any]) -> Floats:
        """Returns the scratch memory of `unpack_trits`: a table of eight entries per code, and a block of values."""
        return self._floats[dtype]


@jit
def pack_trits(values: Any, residual: Any, residual_scale: Any, m: Any, codes: Any, digits: Any) -> None:
    """Makes the codes of ``sign(v) where |v| > m / 2, else 0``; quantised zeros fill the last groups.

    Args:
        values: finite numbers; v = values, or residual_scale·residual + values.
        residual: becomes ``v - m * q``; None: no residual.
        residual_scale, m: in the type of the values; m is the scale.
        codes: uint8[ceil(n / 5)], to be filled.
        digits: uint8[5 * BLOCK_CODES], scratch.
    """
    for start in range(0, codes.size, BLOCK_CODES):
        size, first = min(BLOCK_CODES, codes.size - start), 5 * start
        last = min(first + 5 * size, values.size)
        held = None if residual is None else residual[first:last]
        _digits(values[first:last], held, residual_scale, m, digits)
        digits[last - first : 5 * size] = 1  # quantised zeros
        _join(digits, codes[start : start + size])


@jit
def _digits(values: Any, residual: Any, residual_scale: Any, m: Any, digits: Any) -> None:
    half, zero = m * values.dtype.type(0.5), m - m
    for i in range(values.size):
        v = values[i] if residual is None else residual_scale * residual[i] + values[i]
        above, below = v > half, v < -half
        if residual is not None:
            residual[i] = v - (m if above else (-m if below else zero))
        digits[i] = np.uint8(1) + np.uint8(above) - np.uint8(below)


@jit
def _join(digits: Any, codes: Any) -> None:
    """Packs five neighbouring digits into a code: plain bytes with a stride, which compilers turn into shuffles."""
    wide_vectors()
    for i in range(codes.size):
        a, b, c = np.uint8(81) * digits[5 * i], np.uint8(27) * digits[5 * i + 1], np.uint8(9) * digits[5 * i + 2]
        codes[i] = np.uint8(a + b + c + np.uint8(3) * digits[5 * i + 3] + digits[5 * i + 4])


@jit
def unpack_trits(codes: Any, m: Any, accumulate: bool, floats: Any, out: Any) -> None:
    """``out = m * q``, or ``out += m * q``, for codes that were checked; `floats` is the workspace's."""
    table, block = floats[:_TABLE], floats[_TABLE:]
    zero = m - m
    for i in range(table.size):
        trit = _TRITS[i]
        table[i] = m if trit > 0 else (-m if trit < 0 else (-zero if accumulate else zero))
    if not accumulate:
        _store(codes, table, out)
        return
    for start in range(0, codes.size, _UNPACKED):
        size = min(5 * _UNPACKED, out.size - 5 * start)
        _store(codes[start : start + _UNPACKED], table, block)
        _add(block[:size], out[5 * start : 5 * start + size])


@jit
def _store(codes: Any, table: Any, out: Any) -> None:
    """Writes the rows of `codes`; `out` may have room for fewer values."""
    whole = min(codes.size, (out.size - 8) // 5 + 1) if out.size >= 8 else 0
    for i in range(whole):
        row, at = 8 * codes[i], 5 * i
        # All eight are read before any is written, so that a row moves in one or two vector registers.
        v0, v1, v2, v3 = table[row], table[row + 1], table[row + 2], table[row + 3]
        v4, v5, v6, v7 = table[row + 4], table[row + 5], table[row + 6], table[row + 7]
        out[at], out[at + 1], out[at + 2], out[at + 3] = v0, v1, v2, v3
        out[at + 4], out[at + 5], out[at + 6], out[at + 7] = v4, v5, v6, v7
    for at in range(5 * whole, min(out.size, 5 * codes.size)):
        out[at] = table[8 * codes[at // 5] + at % 5]


@jit
def _add(values: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] += values[i]
