"""3LC of many small float32 arrays in one call: the same arithmetic as `ternary`, byte for byte.

A call of a kernel, and the conversion of its arguments, costs more than the arithmetic of a small tensor. So arrays are
given by their addresses, all of them in one table. The caller keeps them alive, contiguous and of the size it states.
`decode_many` is the way back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.addresses import ONE, Addresses, array_at
from thinwire.kernels.numba.base243 import Workspace, pack_trits
from thinwire.kernels.numba.jit import copy, float_of_bits, frozen, jit, largest_magnitude, magnitude_bits, wide_vectors
from thinwire.kernels.numba.zero_run import _encode

_OVERFLOW = 2.0**128 - 2.0**103  # from here on a product rounds to infinity: half a unit above the largest float32
_MORE_NBYTES = 16  # of a frame, beside its head and its payload: a scale and two numbers


def scales_of_many(
    values: Addresses,
    others: Addresses | None,
    sizes: Addresses,
    residuals: Addresses,
    residual_scales: NDArray[np.float32],
    sparsities: NDArray[np.float32],
) -> NDArray[np.float32] | None:
    """Returns the scale m of each array; None where one has no finite m. Args as for `encode_many`."""
    scales = np.empty(values.size, np.float32)
    found = _scales(values, others, sizes, residuals, residual_scales, sparsities, scales)
    return scales if found else None


def encode_many(
    values: Addresses,
    others: Addresses | None,
    sizes: Addresses,
    residuals: Addresses,
    residual_scales: NDArray[np.float32],
    scales: NDArray[np.float32],
    heads: Bytes,
    head_spans: Addresses,
    *,
    workspace: Workspace,
) -> tuple[Bytes, list[int], list[int]]:
    """`encode_ternary` of many arrays, and the frames around the payloads, all but their checksums.

    Args:
        values: addresses of float32 arrays.
        others: of as many, which are subtracted from the values first; None: nothing is.
        sizes: of each.
        residuals: addresses of float32 arrays as large; 0 where there is none.
        residual_scales: float32[n].
        scales: what `scales_of_many` returned, of the same arrays.
        heads: what frames begin with, up to their scales; read-only.
        head_spans: int64[n, 2], where each array's head begins and ends.
        workspace: scratch, and the home of the frames.

    Returns:
        The frames end to end, where each ends, and its payload's size.
    """
    num_codes, ends, payload_nbytes = (sizes + 4) // 5, np.empty_like(sizes), np.empty_like(sizes)
    workspace.codes.reserve(int(num_codes.max()))
    workspace.payload.reserve(int(num_codes.sum()) + int(np.diff(head_spans).sum()) + _MORE_NBYTES * sizes.size)
    _encode_many(
        values,
        others,
        sizes,
        residuals,
        residual_scales,
        scales,
        heads,
        head_spans,
        workspace.codes.bytes,
        workspace.codes.words,
        workspace.codes.words_at,
        workspace.words,
        workspace.digits,
        workspace.payload.bytes,
        ends,
        payload_nbytes,
    )
    return workspace.payload.bytes, ends.tolist(), payload_nbytes.tolist()


def frames_of_many(
    scales: NDArray[np.float32],
    payloads: NDArray[np.uint8],
    payload_ends: Addresses,
    heads: Bytes,
    head_spans: Addresses,
    *,
    workspace: Workspace,
) -> tuple[Bytes, list[int]]:
    """The frames around payloads that were made elsewhere, all but their checksums.

    Args:
        scales: float32[n].
        payloads: end to end.
        payload_ends: int64[n], where each ends.
        heads, head_spans: as for `encode_many`.
        workspace: the home of the frames.

    Returns:
        The frames end to end, and where each ends.
    """
    ends = np.empty_like(payload_ends)
    workspace.payload.reserve(payloads.size + int(np.diff(head_spans).sum()) + _MORE_NBYTES * ends.size)
    _frame_many(scales, frozen(payloads), payload_ends, heads, head_spans, workspace.payload.bytes, ends)
    return workspace.payload.bytes, ends.tolist()


@jit
def _frame_many(
    scales: Any, payloads: Any, payload_ends: Any, heads: Any, head_spans: Any, frames: Any, ends: Any
) -> None:
    at: Any = 0
    for i in range(scales.size):
        payload = payloads[payload_ends[i - 1] if i else 0 : payload_ends[i]]
        for byte in heads[head_spans[i, 0] : head_spans[i, 1]]:
            frames[at] = byte
            at += 1
        at = _write_numbers(frames, at, scales[i], payload.size)
        copy(payload, frames[at:])
        at += payload.size
        ends[i] = at


@jit
def _scales(
    values: Any,
    others: Any,
    sizes: Any,
    residuals: Any,
    residual_scales: Any,
    sparsities: Any,
    scales: Any,
) -> bool:
    """Each m = max|v| * sparsity, rounded once; False where one overflows or is NaN."""
    for i in range(values.size):
        given = array_at(values[i], sizes[i], ONE)
        less = None if others is None else array_at(others[i], sizes[i], ONE)
        if residuals[i]:
            largest = _largest(given, less, array_at(residuals[i], sizes[i], ONE), residual_scales[i])
        else:
            largest = _largest(given, less, None, residual_scales[i])
        product = np.float64(largest) * np.float64(sparsities[i])
        if not product < _OVERFLOW:
            return False
        scales[i] = product
    return True


@jit
def _largest(values: Any, others: Any, residual: Any, scale: Any) -> Any:
    """`largest_magnitude`, of differences where there are others."""
    if others is None:
        return largest_magnitude(values, residual, scale)
    wide_vectors()
    largest = magnitude_bits(ONE - ONE)
    for i in range(values.size):
        given = values[i] - others[i]
        largest = max(largest, magnitude_bits(given if residual is None else scale * residual[i] + given))
    return float_of_bits(largest)


@jit
def _encode_many(
    values: Any,
    others: Any,
    sizes: Any,
    residuals: Any,
    residual_scales: Any,
    scales: Any,
    heads: Any,
    head_spans: Any,
    codes: Any,
    words: Any,
    words_at: Any,
    scratch: Any,
    digits: Any,
    frames: Any,
    ends: Any,
    payload_nbytes: Any,
) -> None:
    at: Any = 0
    for i in range(values.size):
        given, m, num_codes = array_at(values[i], sizes[i], ONE), scales[i], (sizes[i] + 4) // 5
        own, less = codes[:num_codes], None if others is None else array_at(others[i], sizes[i], ONE)
        if residuals[i]:
            held = array_at(residuals[i], sizes[i], ONE)
            pack_trits(given, less, held, residual_scales[i], m, own, digits)
        else:
            pack_trits(given, less, None, residual_scales[i], m, own, digits)
        size = _encode(words, num_codes, words_at, scratch)
        for byte in heads[head_spans[i, 0] : head_spans[i, 1]]:
            frames[at] = byte
            at += 1
        at = _write_numbers(frames, at, m, size)
        copy(codes[:size], frames[at:])
        at += size
        ends[i], payload_nbytes[i] = at, size


@jit
def _write_numbers(frames: Any, at: Any, scale: Any, size: Any) -> Any:
    """What stands between a frame's head and its payload: one scale, and the payload's size, seven bits a byte."""
    frames[at] = 1
    bits = np.uint32(magnitude_bits(scale))  # a scale is never negative
    for place in range(4):
        frames[at + 1 + place] = (bits >> np.uint32(8 * place)) & np.uint32(0xFF)
    at += 5
    while size >= 0x80:
        frames[at] = size & 0x7F | 0x80
        size >>= 7
        at += 1
    frames[at] = size
    return at + 1
