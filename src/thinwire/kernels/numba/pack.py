"""Floats, or trits, into base-3^5 codes (3LC, sections 3.1 and 3.2): the second pass of an encoder.

A block of 4,096 codes at a time: first one plain loop turns values into digits 0, 1, 2 (two comparisons with the
threshold, no division) and leaves what was not sent in the residual; then the digits, still in the cache, become
codes. With the partition layout, digits of one fifth of the array at a time are added to the codes. Any range of
codes can be made alone, so that several threads may share a tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Bytes, check_layout, num_codes_of
from thinwire.kernels.numba.jit import jit, wide_vectors
from thinwire.kernels.numba.magnitude import frozen
from thinwire.kernels.numba.workspace import BLOCK_CODES, Workspace


def pack_base243(trits: NDArray[np.int8], *, layout: str = "stride", pad: int = 1, workspace: Workspace) -> Bytes:
    """Five trits to a byte, ``81*d0 + 27*d1 + 9*d2 + 3*d3 + d4`` with d = trit + 1.

    Args:
        trits: int8[n] of -1, 0, 1.
        layout: "stride" groups five neighbours; "partition" takes one trit from each fifth of the array.
        pad: the digit that fills the last group(s); 1 is a quantised zero, the paper's text says 0.
        workspace: holds the result.

    Returns:
        uint8[ceil(n / 5)], every byte at most 242; a view into the workspace, valid until its next use.

    Example:
        >>> pack_base243(np.array([1, 0, 0, 0, 0], dtype=np.int8), workspace=Workspace()).tolist()
        [202]
    """
    codes = _room(trits.size, layout, workspace)
    _pack_trits(frozen(trits), codes, layout == "partition", pad, workspace.digits)
    return codes


def quantise(
    values: Any,
    m: Any,
    *,
    residual: Any = None,
    residual_scale: Any = None,
    layout: str,
    pad: int,
    workspace: Workspace,
    codes: Bytes | None = None,
    span: tuple[int, int] | None = None,
) -> Bytes:
    """Codes of ``sign(v) where |v| > m / 2, else 0``; see `pack_base243` for the rest.

    Args:
        values: a read-only view of finite numbers; v is these, or residual_scale * residual + values.
        m: the scale, in the type of the values.
        residual: becomes ``v - m * q`` where the codes are made; None: nothing is kept.
        residual_scale: in the type of the values.
        layout: see `pack_base243`.
        pad: see `pack_base243`.
        workspace: scratch, and the home of the codes unless they are given.
        codes: uint8[ceil(n / 5)] to fill.
        span: the first code to make and the one behind the last; None makes all.
    """
    codes = _room(values.size, layout, workspace) if codes is None else codes
    begin, end = (0, codes.size) if span is None else span
    partition, digits = layout == "partition", workspace.digits
    if residual is None:
        _pack_values(values, m, codes, begin, end, partition, pad, digits)
    else:
        _pack_sums(values, residual, residual_scale, m, codes, begin, end, partition, pad, digits)
    return codes


def _room(num_values: int, layout: str, workspace: Workspace) -> Bytes:
    check_layout(layout)
    num_codes = num_codes_of(num_values)
    workspace.payload.reserve(num_codes)
    return workspace.payload.bytes[:num_codes]


@jit
def _pack_trits(trits: Any, codes: Any, partition: bool, pad: Any, digits: Any) -> None:
    num_values, num_codes = trits.size, codes.size
    for start in range(0, num_codes, BLOCK_CODES):
        size = min(BLOCK_CODES, num_codes - start)
        for place in range(5 if partition else 1):
            first, last = _span(start, size, place, partition, num_codes, num_values)
            for i in range(last - first):
                digits[i] = trits[first + i] + 1
            _collect(digits, last - first, codes[start : start + size], place, partition, pad)


@jit
def _pack_values(
    values: Any,
    m: Any,
    codes: Any,
    begin: int,
    end: int,
    partition: bool,
    pad: Any,
    digits: Any,
) -> None:
    num_values, num_codes, half = values.size, codes.size, m * values.dtype.type(0.5)
    for start in range(begin, end, BLOCK_CODES):
        size = min(BLOCK_CODES, end - start)
        for place in range(5 if partition else 1):
            first, last = _span(start, size, place, partition, num_codes, num_values)
            _digits_of_values(values[first:last], half, digits)
            _collect(digits, last - first, codes[start : start + size], place, partition, pad)


@jit
def _pack_sums(
    values: Any,
    residual: Any,
    residual_scale: Any,
    m: Any,
    codes: Any,
    begin: int,
    end: int,
    partition: bool,
    pad: Any,
    digits: Any,
) -> None:
    num_values, num_codes, half = values.size, codes.size, m * values.dtype.type(0.5)
    for start in range(begin, end, BLOCK_CODES):
        size = min(BLOCK_CODES, end - start)
        for place in range(5 if partition else 1):
            first, last = _span(start, size, place, partition, num_codes, num_values)
            _digits_of_sums(values[first:last], residual[first:last], residual_scale, m, half, digits)
            _collect(digits, last - first, codes[start : start + size], place, partition, pad)


@jit
def _span(start: int, size: int, place: int, partition: bool, num_codes: int, num_values: int) -> tuple[int, int]:
    """The values whose digits of this place (of all five places, with the stride layout) make a block of codes."""
    first = place * num_codes + start if partition else 5 * start
    last = first + (size if partition else 5 * size)
    return min(first, num_values), min(last, num_values)


@jit
def _digits_of_values(values: Any, half: Any, digits: Any) -> None:
    for i in range(values.size):
        v = values[i]
        digits[i] = np.uint8(v > half) + np.uint8(v >= -half)


@jit
def _digits_of_sums(values: Any, residual: Any, residual_scale: Any, m: Any, half: Any, digits: Any) -> None:
    zero = m - m
    for i in range(values.size):
        v = residual_scale * residual[i] + values[i]
        above, below = v > half, v < -half
        residual[i] = v - (m if above else (-m if below else zero))
        digits[i] = np.uint8(1) + np.uint8(above) - np.uint8(below)


@jit
def _collect(digits: Any, known: int, codes: Any, place: int, partition: bool, pad: Any) -> None:
    """Pad the block's `known` digits and make codes of them; a place of the partition layout is added to the codes."""
    size = codes.size
    digits[known : size if partition else 5 * size] = pad
    if not partition:
        _join(digits, codes)
    elif place == 0:
        codes[:] = digits[:size]
    else:
        for i in range(size):
            codes[i] = np.uint8(3) * codes[i] + digits[i]


@jit
def _join(digits: Any, codes: Any) -> None:
    """Five neighbouring digits to a code: plain bytes with a stride, which compilers make shuffles of."""
    wide_vectors()
    for i in range(codes.size):
        a, b, c = np.uint8(81) * digits[5 * i], np.uint8(27) * digits[5 * i + 1], np.uint8(9) * digits[5 * i + 2]
        codes[i] = np.uint8(a + b + c + np.uint8(3) * digits[5 * i + 3] + digits[5 * i + 4])
