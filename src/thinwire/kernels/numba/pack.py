"""Floats into base-3^5 codes (3LC, sections 3.1 and 3.2): the second pass of an encoder.

A code is five trits, ``81*d0 + 27*d1 + 9*d2 + 3*d3 + d4`` with d = trit + 1. Layout "stride" groups five neighbours;
"partition" takes one trit from each fifth of the array.

A block of 4,096 codes at a time: first one plain loop turns values into digits 0, 1, 2 (two comparisons with the
threshold, no division) and leaves what was not sent in the residual; then the digits, still in the cache, become
codes. With the partition layout, digits of one fifth of the array at a time are added to the codes. Any range of
codes can be made alone, so that several threads may share a tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.kernels.contract import Bytes, check_layout, num_codes_of
from thinwire.kernels.numba.jit import jit, wide_vectors
from thinwire.kernels.numba.workspace import BLOCK_CODES, Workspace


def quantise(
    values: Any,
    m: Any,
    *,
    residual: Any,
    residual_scale: Any,
    layout: str,
    pad: int,
    workspace: Workspace,
    codes: Bytes | None = None,
    span: tuple[int, int] | None = None,
) -> Bytes:
    """Codes of ``sign(v) where |v| > m / 2, else 0``, v = values, or residual_scale·residual + values.

    Args:
        values: a read-only view of finite numbers.
        m: the scale, in the type of the values.
        residual: becomes ``v - m * q`` where the codes are made; None: nothing is kept.
        residual_scale: in the type of the values.
        layout: "stride" or "partition".
        pad: the digit that fills the last group(s); 1 is a quantised zero, the paper's text says 0.
        workspace: scratch, and the home of the codes unless they are given.
        codes: uint8[ceil(n / 5)] to fill.
        span: the first code to make and the one behind the last; None makes all.

    Returns:
        The codes, every byte at most 242; in the workspace, valid until its next use.
    """
    if codes is None:
        check_layout(layout)
        num_codes = num_codes_of(values.size)
        workspace.payload.reserve(num_codes)
        codes = workspace.payload.bytes[:num_codes]
    begin, end = (0, codes.size) if span is None else span
    _pack(values, residual, residual_scale, m, codes, begin, end, layout == "partition", pad, workspace.digits)
    return codes


@jit
def _pack(
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
    num_values, num_codes = values.size, codes.size
    for start in range(begin, end, BLOCK_CODES):
        size = min(BLOCK_CODES, end - start)
        for place in range(5 if partition else 1):
            # The values whose digits of this place (of all five places, with the stride layout) make the block's codes.
            first = place * num_codes + start if partition else 5 * start
            last = min(first + (size if partition else 5 * size), num_values)
            first = min(first, num_values)
            held = None if residual is None else residual[first:last]
            _digits(values[first:last], held, residual_scale, m, digits)
            _collect(digits, last - first, codes[start : start + size], place, partition, pad)


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
