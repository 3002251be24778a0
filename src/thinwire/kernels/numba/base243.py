"""Floats to base-3^5 codes and back (3LC, sections 3.1 and 3.2), and the scratch memory of a 3LC call.

A code is five neighbouring trits, ``81*d0 + 27*d1 + 9*d2 + 3*d3 + d4`` with d = trit + 1.

Packing takes a block of 4,096 codes at a time: first one plain loop turns values into digits 0, 1, 2 (two comparisons
with the threshold, no division) and leaves what was not sent in the residual; then the digits, still in the cache,
become codes.

To unpack, a table holds, for each code, its five values already multiplied by the scale; a code is one table row,
written at its place (the three fillers behind it are overwritten by the next row). The zero of the addition tables is
-0.0: adding it changes no bit of any number, +0.0 and -0.0 included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import FIRST_RUN, LONGEST_RUN, ZERO_CODE, Bytes, Floats
from thinwire.kernels.numba.jit import frozen, jit, wide_vectors, words_apart

BLOCK_CODES = 4096  # codes per block: 20,480 values, so that a block's digits stay in the first-level cache
SLACK = 64  # bytes behind the last code: kernels write whole words
_PLACES = np.array([81, 27, 9, 3, 1, 1, 1, 1])
_DIGITS = (np.arange(256)[:, None] // _PLACES % 3).astype(np.uint8)  # of each code, and three fillers
_TRITS = (_DIGITS.ravel() - 1).astype(np.int8)
# What a payload byte moves the position by, and whether it is a code that holds anything but zeros.
_ADVANCE = np.array([5] * FIRST_RUN + [5 * k for k in range(2, LONGEST_RUN + 1)], dtype=np.uint8)
_SENT = np.array([b < FIRST_RUN and b != ZERO_CODE for b in range(256)], dtype=np.uint8)
_SPREAD = _DIGITS.view(np.uint64).ravel()  # the digits of a code as the bytes of one word


class Grown:
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
        """Hold at least `capacity` bytes; what was inside is lost when that needs a new buffer."""
        if self.bytes.size < capacity + SLACK:
            self._resize(capacity)


class Workspace:
    """The scratch buffers of one caller. Not thread safe: one per thread, or per owner that takes turns.

    Example:
        >>> import numpy as np
        >>> from thinwire.kernels.numba import encode_ternary
        >>> workspace = Workspace()
        >>> scale, payload = encode_ternary(np.zeros(1000, np.float32), sparsity=1.0, workspace=workspace)
        >>> payload.size, workspace.nbytes < 200_000
        (15, True)
    """

    def __init__(self) -> None:
        self.payload = Grown()
        self.codes = Grown()
        self.digits: Bytes = np.zeros(5 * BLOCK_CODES + 8, dtype=np.uint8)
        self.groups = words_apart(self.digits, 5)  # word i holds the digits of code i, and three of the next
        self.words: NDArray[np.uint64] = np.zeros((3, BLOCK_CODES // 8 + 1), dtype=np.uint64)
        self.found: NDArray[np.int64] = np.zeros(1024, dtype=np.int64)  # where a sparse payload sends values
        self._tables = {np.dtype(t): np.zeros(256 * 8, dtype=t) for t in (np.float32, np.float64)}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held: list[NDArray[Any]] = [self.payload.bytes, self.codes.bytes, self.digits, self.words, self.found]
        return sum(array.nbytes for array in [*held, *self._tables.values()])

    def table(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A table of `dtype`, eight entries per code: its five values, and three fillers."""
        return self._tables[dtype]


@jit
def pack_trits(
    values: Any,
    others: Any,
    residual: Any,
    residual_scale: Any,
    m: Any,
    codes: Any,
    digits: Any,
) -> None:
    """Makes the codes of ``sign(v) where |v| > m / 2, else 0``; quantised zeros fill the last group(s).

    Args:
        values: a read-only view of finite numbers; v = values, or residual_scale·residual + values.
        others: what is to be subtracted from the values first; None: nothing.
        residual: becomes ``v - m * q``; None: nothing is kept.
        residual_scale, m: in the type of the values; m is the scale.
        codes: uint8[ceil(n / 5)], to be filled.
        digits: uint8[5 * BLOCK_CODES], scratch.
    """
    for start in range(0, codes.size, BLOCK_CODES):
        size, first = min(BLOCK_CODES, codes.size - start), 5 * start
        last = min(first + 5 * size, values.size)
        held = None if residual is None else residual[first:last]
        less = None if others is None else others[first:last]
        _digits(values[first:last], less, held, residual_scale, m, digits)
        digits[last - first : 5 * size] = 1  # quantised zeros
        _join(digits, codes[start : start + size])


@jit
def _digits(values: Any, others: Any, residual: Any, residual_scale: Any, m: Any, digits: Any) -> None:
    half, zero = m * values.dtype.type(0.5), m - m
    for i in range(values.size):
        given = values[i] if others is None else values[i] - others[i]
        v = given if residual is None else residual_scale * residual[i] + given
        above, below = v > half, v < -half
        if residual is not None:
            residual[i] = v - (m if above else (-m if below else zero))
        digits[i] = np.uint8(1) + np.uint8(above) - np.uint8(below)


@jit
def _join(digits: Any, codes: Any) -> None:
    """Five neighbouring digits to a code: plain bytes with a stride, which compilers make shuffles of."""
    wide_vectors()
    for i in range(codes.size):
        a, b, c = np.uint8(81) * digits[5 * i], np.uint8(27) * digits[5 * i + 1], np.uint8(9) * digits[5 * i + 2]
        codes[i] = np.uint8(a + b + c + np.uint8(3) * digits[5 * i + 3] + digits[5 * i + 4])


def unpack_trits(codes: Bytes, *, scale: float, out: Floats, accumulate: bool, workspace: Workspace) -> None:
    """``out = scale * q``, or ``out += scale * q``, for codes that were checked."""
    zero, m = out.dtype.type(-0.0 if accumulate else 0.0), out.dtype.type(scale)
    if accumulate:
        _add_stride(frozen(codes), m, zero, workspace.digits, workspace.groups, out)
    else:
        _store_stride(frozen(codes), _scaled_table(m, zero, workspace), out)


def add_sparse(payload: Bytes, *, scale: float, out: Floats, workspace: Workspace) -> None:
    """``out += scale * q`` for a checked zero-run payload; runs of zeros cost nothing."""
    kind = out.dtype.type
    _add_sparse(frozen(payload), _scaled_table(kind(scale), kind(-0.0), workspace), workspace.found, out)


def _scaled_table(m: Any, zero: Any, workspace: Workspace) -> Floats:
    """Flat [256 * 8] of ``m * trit``, with the given zero."""
    table = workspace.table(zero.dtype)
    _fill_table(_TRITS, m, zero, table)
    return table


@jit
def _fill_table(trits: Any, m: Any, zero: Any, table: Any) -> None:
    for i in range(table.size):
        trit = trits[i]
        table[i] = m if trit > 0 else (-m if trit < 0 else zero)


@jit
def _store_stride(codes: Any, table: Any, out: Any) -> None:
    whole = min(codes.size, (out.size - 8) // 5 + 1) if out.size >= 8 else 0
    for i in range(whole):
        row, at = 8 * codes[i], 5 * i
        # All eight are read before any is written, so that a row moves in one or two vector registers.
        v0, v1, v2, v3 = table[row], table[row + 1], table[row + 2], table[row + 3]
        v4, v5, v6, v7 = table[row + 4], table[row + 5], table[row + 6], table[row + 7]
        out[at], out[at + 1], out[at + 2], out[at + 3] = v0, v1, v2, v3
        out[at + 4], out[at + 5], out[at + 6], out[at + 7] = v4, v5, v6, v7
    for at in range(5 * whole, out.size):
        out[at] = table[8 * codes[at // 5] + at % 5]


@jit
def _add_stride(codes: Any, m: Any, zero: Any, digits: Any, groups: Any, out: Any) -> None:
    # Rows of five cannot be added in whole registers as they are stored, so a block's digits are laid out first.
    for start in range(0, codes.size, BLOCK_CODES):
        block = codes[start : start + BLOCK_CODES]
        for i in range(block.size):
            groups[i] = _SPREAD[block[i]]
        _add_digits(digits, m, zero, out[5 * start : min(5 * (start + BLOCK_CODES), out.size)])


@jit
def _add_digits(digits: Any, m: Any, zero: Any, out: Any) -> None:
    for i in range(out.size):
        digit = digits[i]
        out[i] += m if digit > 1 else (-m if digit < 1 else zero)


@jit
def _add_sparse(payload: Any, table: Any, found: Any, out: Any) -> None:
    at: Any = 0
    for start in range(0, payload.size, found.size):
        # First note where values were sent, without a branch to mispredict; then add there.
        num_found: Any = 0
        for byte in payload[start : start + found.size]:
            found[num_found] = (at << 8) | np.int64(byte)
            num_found += np.int64(_SENT[byte])
            at += np.int64(_ADVANCE[byte])
        _add_found(found[:num_found], table, out)


@jit
def _add_found(found: Any, table: Any, out: Any) -> None:
    whole = out.size - 5
    for packed in found:
        at, row = packed >> 8, (packed & 255) << 3
        if at <= whole:
            v0, v1, v2, v3, v4 = out[at], out[at + 1], out[at + 2], out[at + 3], out[at + 4]
            v0 += table[row]
            v1 += table[row + 1]
            v2 += table[row + 2]
            v3 += table[row + 3]
            v4 += table[row + 4]
            out[at], out[at + 1], out[at + 2], out[at + 3], out[at + 4] = v0, v1, v2, v3, v4
        else:
            for place in range(out.size - at):
                out[at + place] += table[row + place]
