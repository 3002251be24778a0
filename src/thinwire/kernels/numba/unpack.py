"""Base-3^5 codes back into floats: the store, the dense addition, and the addition that skips zeros.

With the stride layout a table holds, for each code, its five values already multiplied by the scale; a code is one
table row, written at its place (the three fillers behind it are overwritten by the next row). With the partition
layout the digits are taken out one place at a time by multiplication: ``code / 243``, rounded up to a 256th, is a
fraction whose digits in base 3 come out above the point one after the other.

The zero of the addition tables is -0.0: adding it changes no bit of any number, +0.0 and -0.0 included.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.kernels.contract import FIRST_RUN, LONGEST_RUN, ZERO_CODE, Bytes, Floats
from thinwire.kernels.numba.jit import frozen, jit
from thinwire.kernels.numba.workspace import BLOCK_CODES, Workspace

_PLACES = np.array([81, 27, 9, 3, 1, 1, 1, 1])
_DIGITS = (np.arange(256)[:, None] // _PLACES % 3).astype(np.uint8)  # of each code, and three fillers
_TRITS = (_DIGITS.ravel() - 1).astype(np.int8)
# What a payload byte moves the position by, and whether it is a code that holds anything but zeros.
_ADVANCE = np.array([5] * FIRST_RUN + [5 * k for k in range(2, LONGEST_RUN + 1)], dtype=np.uint8)
_SENT = np.array([b < FIRST_RUN and b != ZERO_CODE for b in range(256)], dtype=np.uint8)
_SPREAD = _DIGITS.view(np.uint64).ravel()  # the digits of a code as the bytes of one word


def dequantise(
    codes: Bytes,
    *,
    scale: float,
    out: Floats,
    layout: str,
    accumulate: bool,
    workspace: Workspace,
    first: int = 0,
    num_codes: int | None = None,
) -> None:
    """``out = scale * q``, or ``out += scale * q``, for codes that were checked.

    With the partition layout, `codes` may be those from number `first` on of `num_codes`, and `out` belongs to all of
    them; with the stride layout, a slice of the codes belongs to a slice of `out`.
    """
    dtype = out.dtype
    zero = dtype.type(-0.0 if accumulate else 0.0)
    m = dtype.type(scale)
    if layout == "partition":
        _unpack_partition(
            frozen(codes), first, codes.size if num_codes is None else num_codes, m, zero, accumulate, out
        )
    elif accumulate:
        _add_stride(frozen(codes), m, zero, workspace.digits, workspace.groups, out)
    else:
        _store_stride(frozen(codes), scaled_table(scale, zero, workspace), out)


def add_sparse(payload: Bytes, *, scale: float, out: Floats, workspace: Workspace) -> None:
    """``out += scale * q`` for a checked zero-run payload of the stride layout; runs of zeros cost nothing."""
    _add_sparse(frozen(payload), scaled_table(scale, out.dtype.type(-0.0), workspace), workspace.found, out)


def scaled_table(scale: float, zero: Any, workspace: Workspace) -> Floats:
    """Flat [256 * 8] of ``scale * digit``, with the given zero."""
    table = workspace.table(zero.dtype)
    _fill_table(_TRITS, zero.dtype.type(scale), zero, table)
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


@jit
def _unpack_partition(codes: Any, first: int, num_codes: int, m: Any, zero: Any, accumulate: bool, out: Any) -> None:
    for place in range(5):
        begin = min(place * num_codes + first, out.size)
        end = min(begin + codes.size, out.size)
        _unpack_place(codes[: end - begin], 3**place, m, zero, accumulate, out[begin:end])


@jit
def _unpack_place(codes: Any, power: int, m: Any, zero: Any, accumulate: bool, out: Any) -> None:
    for i in range(codes.size):
        digit = _digit(codes[i], power)
        value = m if digit == 2 else (-m if digit == 0 else zero)
        out[i] = out[i] + value if accumulate else value


@jit
def _digit(code: Any, power: int) -> Any:
    """Digit `place` of a code, with power = 3**place: exact for codes 0..242."""
    # In [256 * code / 243, 256 * (code + 1) / 243) for every code, which is all that the digits need.
    fraction = (np.int32(1079) * np.int32(code) + np.int32(1024)) >> np.int32(10)
    return (((fraction * np.int32(power)) & np.int32(255)) * np.int32(3)) >> np.int32(8)
