"""3LC of many small arrays in one call, float32 and the stride layout: the same arithmetic as `ternary`, byte for byte.

A call of a kernel, and the conversion of its arguments, costs more than the arithmetic of a small tensor. So arrays are
given by their addresses, all of them in one table. The caller keeps them alive, contiguous and of the size it states.

A received frame is checked here as well, all but its checksum, against the head that is expected of it. One that is
anything else is left to the caller: it may be right, of another codec, or damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from thinwire.kernels.contract import Bytes, Floats, num_codes_of
from thinwire.kernels.numba.base243 import (
    _TRITS,
    Workspace,
    _add_sparse,
    _add_stride,
    _fill_table,
    _store_stride,
    pack_trits,
)
from thinwire.kernels.numba.jit import float_of_bits, frozen, jit, largest_magnitude, magnitude_bits
from thinwire.kernels.numba.ternary import SPARSE_BELOW
from thinwire.kernels.numba.zero_run import _decode, _encode, _expanded

Addresses = NDArray[np.int64]

_OVERFLOW = 2.0**128 - 2.0**103  # from here on a product rounds to infinity: half a unit above the largest float32
_ONE = np.float32(1)
_MORE_NBYTES = 16  # of a frame, beside its head and its payload: a scale and two numbers
_ADDED, _STORED = np.float32(-0.0), np.float32(0.0)  # adding -0.0 changes no bit of any number


def largest_of_many(values: Addresses, sizes: Addresses) -> list[float]:
    """Returns the largest magnitude in each of the float32 arrays at these addresses; NaN or Inf where a value is.

    Example:
        >>> array = np.array([1, -3, 2], np.float32)
        >>> largest_of_many(np.array([array.ctypes.data]), np.array([3]))
        [3.0]
    """
    largest = np.empty(values.size, np.float32)
    _largest_of_many(values, sizes, largest)
    return largest.tolist()


def gather(parts: Addresses, sizes: Addresses, whole: Floats) -> None:
    """Copies float32 or float64 arrays, given by their addresses, into one that they fill."""
    _gather(parts, sizes, whole)


def scatter(whole: Floats, parts: Addresses, sizes: Addresses) -> None:
    """Copies the parts of one array to where they belong: the reverse of `gather`."""
    _scatter(frozen(whole), parts, sizes)


def add_to_many(whole: Floats, parts: Addresses, sizes: Addresses) -> None:
    """Adds the parts of one float32 array to the arrays where they belong.

    Example:
        >>> first, second = np.ones(2, np.float32), np.ones(1, np.float32)
        >>> places = np.array([first.ctypes.data, second.ctypes.data])
        >>> add_to_many(np.array([1, 2, 3], np.float32), places, np.array([2, 1]))
        >>> first.tolist(), second.tolist()
        ([2.0, 3.0], [4.0])
    """
    _add_to_many(frozen(whole), parts, sizes)


def encode_many(
    values: Addresses,
    sizes: Addresses,
    residuals: Addresses,
    residual_scales: NDArray[np.float32],
    sparsities: NDArray[np.float32],
    heads: Bytes,
    head_spans: Addresses,
    *,
    workspace: Workspace,
) -> tuple[Bytes, list[int], list[int]] | None:
    """`encode_ternary` of many arrays, and the frames around the payloads, all but their checksums.

    Args:
        values: addresses of float32 arrays.
        sizes: of each.
        residuals: addresses of float32 arrays as large; 0 where there is none.
        residual_scales: float32[n].
        sparsities: float32[n].
        heads: what frames begin with, up to their scales; read-only.
        head_spans: int64[n, 2], where each array's head begins and ends.
        workspace: scratch, and the home of the frames.

    Returns:
        The frames end to end, where each ends, and its payload's size; or None, and no residual has changed, where an
        array has no finite m.
    """
    scales = np.empty(values.size, np.float32)
    if not _scales(values, sizes, residuals, residual_scales, sparsities, scales):
        return None
    num_codes, ends, payload_nbytes = (sizes + 4) // 5, np.empty_like(sizes), np.empty_like(sizes)
    workspace.codes.reserve(int(num_codes.max()))
    workspace.payload.reserve(int(num_codes.sum()) + int(np.diff(head_spans).sum()) + _MORE_NBYTES * sizes.size)
    _encode_many(
        values,
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


def decode_many(
    frames: Bytes,
    ends: Addresses,
    heads: Bytes,
    head_spans: Addresses,
    outs: Addresses,
    sizes: Addresses,
    accumulate: NDArray[np.bool_],
    *,
    workspace: Workspace,
) -> list[int]:
    """Stores or adds the values of many frames whose checksums are right.

    Args:
        frames: end to end, without their checksums; read-only.
        ends: where each ends.
        heads, head_spans: the only head that each may have, as for `encode_many`.
        outs: addresses of the float32 arrays to fill; 0 where a frame is only looked at.
        sizes: of each.
        accumulate: whether to add, for each.
        workspace: scratch.

    Returns:
        The size of each payload in bytes; 0 for a frame that is not the one expected, and its array is untouched.
    """
    workspace.codes.reserve(num_codes_of(int(sizes.max())))
    payload_nbytes = np.zeros_like(sizes)
    _decode_many(
        frames,
        ends,
        heads,
        head_spans,
        outs,
        sizes,
        accumulate,
        workspace.codes.bytes,
        workspace.codes.words_at,
        workspace.digits,
        workspace.groups,
        workspace.found,
        workspace.table(np.dtype(np.float32)),
        payload_nbytes,
    )
    found: list[int] = payload_nbytes.tolist()
    return found


@intrinsic
def _pointer(typing_context: Any, address: Any, like: Any) -> tuple[Any, Callable[..., Any]]:
    """In a kernel: an address as a pointer to numbers of the type of `like`."""
    pointer: Any = types.CPointer(like)  # type: ignore[attr-defined]  # which its __init__ fills by exec

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(address, like), generate


@jit
def _array(address: Any, size: Any, like: Any) -> Any:
    return carray(_pointer(address, like), size)


@jit
def _largest_of_many(values: Any, sizes: Any, largest: Any) -> None:
    for i in range(values.size):
        largest[i] = largest_magnitude(_array(values[i], sizes[i], _ONE), None, _ONE)


@jit
def _gather(parts: Any, sizes: Any, whole: Any) -> None:
    at = 0
    for i in range(parts.size):
        whole[at : at + sizes[i]] = _array(parts[i], sizes[i], whole[0])
        at += sizes[i]


@jit
def _scatter(whole: Any, parts: Any, sizes: Any) -> None:
    at = 0
    for i in range(parts.size):
        _array(parts[i], sizes[i], whole[0])[:] = whole[at : at + sizes[i]]
        at += sizes[i]


@jit
def _add_to_many(whole: Any, parts: Any, sizes: Any) -> None:
    at = 0
    for i in range(parts.size):
        part = _array(parts[i], sizes[i], whole[0])
        for k in range(sizes[i]):
            part[k] += whole[at + k]
        at += sizes[i]


@jit
def _scales(values: Any, sizes: Any, residuals: Any, residual_scales: Any, sparsities: Any, scales: Any) -> bool:
    """Each m = max|v| * sparsity, rounded once; False where one overflows or is NaN."""
    for i in range(values.size):
        given = _array(values[i], sizes[i], _ONE)
        if residuals[i]:
            largest = largest_magnitude(given, _array(residuals[i], sizes[i], _ONE), residual_scales[i])
        else:
            largest = largest_magnitude(given, None, residual_scales[i])
        product = np.float64(largest) * np.float64(sparsities[i])
        if not product < _OVERFLOW:
            return False
        scales[i] = product
    return True


@jit
def _encode_many(
    values: Any,
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
        given, m, num_codes = _array(values[i], sizes[i], _ONE), scales[i], (sizes[i] + 4) // 5
        own = codes[:num_codes]
        if residuals[i]:
            held = _array(residuals[i], sizes[i], _ONE)
            pack_trits(given, held, residual_scales[i], m, own, 0, num_codes, False, 1, digits)
        else:
            pack_trits(given, None, residual_scales[i], m, own, 0, num_codes, False, 1, digits)
        size = _encode(words, num_codes, words_at, scratch)
        for byte in heads[head_spans[i, 0] : head_spans[i, 1]]:
            frames[at] = byte
            at += 1
        at = _write_numbers(frames, at, m, size)
        frames[at : at + size] = codes[:size]
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


@jit
def _decode_many(
    frames: Any,
    ends: Any,
    heads: Any,
    head_spans: Any,
    outs: Any,
    sizes: Any,
    accumulate: Any,
    codes: Any,
    words_at: Any,
    digits: Any,
    groups: Any,
    found: Any,
    table: Any,
    payload_nbytes: Any,
) -> None:
    for i in range(outs.size):
        head = heads[head_spans[i, 0] : head_spans[i, 1]]
        frame = frames[ends[i - 1] if i else 0 : ends[i]]
        begin, scale = _begin_of_payload(frame, head)
        num_codes = (sizes[i] + 4) // 5
        if not begin or _expanded(frame[begin:]) != num_codes:
            continue
        payload_nbytes[i] = frame.size - begin
        if not outs[i]:
            continue
        payload, out = frame[begin:], _array(outs[i], sizes[i], _ONE)
        if accumulate[i] and payload.size < SPARSE_BELOW * num_codes:
            _fill_table(_TRITS, scale, _ADDED, table)
            _add_sparse(payload, table, found, out)
        else:
            _decode(payload, words_at)
            if accumulate[i]:
                _add_stride(codes[:num_codes], scale, _ADDED, digits, groups, out)
            else:
                _fill_table(_TRITS, scale, _STORED, table)
                _store_stride(codes[:num_codes], table, out)


@jit
def _begin_of_payload(frame: Any, head: Any) -> Any:
    """Where a frame's payload begins, and its one scale; (0, 0) for a frame that is not the one expected."""
    nothing = 0, np.float32(0)
    at = head.size + 5
    if frame.size <= at:
        return nothing
    for i in range(head.size):
        if frame[i] != head[i]:
            return nothing
    bits = np.uint32(0)
    for i in range(4):
        bits |= np.uint32(frame[head.size + 1 + i]) << np.uint32(8 * i)
    scale = float_of_bits(np.int32(bits))
    if frame[head.size] != 1 or not 0.0 <= scale < np.inf:
        return nothing
    # The payload's size; none here takes more than four bytes of it.
    length: Any = 0
    shift = 0
    while at < frame.size and shift < 28:
        byte = np.int64(frame[at])
        at += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            shortest = byte > 0 or shift == 0
            return (at, scale) if shortest and length == frame.size - at else nothing
        shift += 7
    return nothing
