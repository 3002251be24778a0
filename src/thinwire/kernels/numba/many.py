"""3LC of many small float32 arrays in one call: the same arithmetic as `ternary`, byte for byte.

A kernel call, with the conversion of its arguments, costs more than the arithmetic of a small tensor. Callers give
arrays by their addresses, in one table, and keep them alive, contiguous and of the stated sizes.

Received frames are checked, except for their checksums, against their expected heads. Frames that differ are left to
the caller: they may be of another codec, or damaged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Bytes, num_codes_of
from thinwire.kernels.numba.addresses import ONE, Addresses, array_at
from thinwire.kernels.numba.base243 import Workspace
from thinwire.kernels.numba.jit import copy, float_of_bits, frozen, jit, largest_magnitude, magnitude_bits
from thinwire.kernels.numba.ternary import OVERFLOW, decode_codes, encode_codes
from thinwire.kernels.numba.zero_run import count_expanded

_OVERFLOW = OVERFLOW[np.dtype(np.float32)]
_MORE_NBYTES = 16  # bytes of a frame beside its head and its payload: a scale and two numbers


class Given(NamedTuple):
    """Arrays to encode; each field holds one property of all arrays.

    Attributes:
        values: addresses of float32 arrays.
        minus: addresses of float32 arrays that are subtracted from the values first; None: no subtraction.
        sizes: of each array.
        residuals: addresses of float32 arrays of the same sizes; 0 without a residual.
        residual_scales: float32[n].
        differences: scratch, float32[the largest size] with `minus`.
    """

    values: Addresses
    minus: Addresses | None
    sizes: Addresses
    residuals: Addresses
    residual_scales: NDArray[np.float32]
    differences: NDArray[np.float32]


class Heads(NamedTuple):
    """The heads of frames, up to their scales: end to end, read-only; and int64[n, 2], each one's start and end."""

    data: Bytes
    spans: Addresses


def scales_of_many(given: Given, multipliers: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """Returns the scale m of each array, max|v| times its multiplier; None where an m is not finite."""
    scales = np.empty(given.sizes.size, np.float32)
    return scales if _scales(given, multipliers, scales) else None


def encode_many(
    given: Given, scales: NDArray[np.float32], heads: Heads, *, workspace: Workspace
) -> tuple[Bytes, list[int], list[int]]:
    """Encodes many arrays as `encode_ternary`, and makes frames without checksums around the payloads.

    Args:
        given: the arrays.
        scales: of the same arrays, from `scales_of_many`.
        heads: of the frames.
        workspace: scratch; holds the frames.

    Returns:
        The frames end to end, and each one's end and payload size.
    """
    num_codes, ends, payload_nbytes = (given.sizes + 4) // 5, np.empty_like(given.sizes), np.empty_like(given.sizes)
    codes, frames = workspace.codes, workspace.payload
    codes.reserve(int(num_codes.max()))
    frames.reserve(int(num_codes.sum()) + _room(heads))
    into = frames.bytes, ends, payload_nbytes
    _encode_many(
        given, scales, heads, codes.bytes, codes.words, codes.words_at, workspace.words, workspace.digits, *into
    )
    return frames.bytes, ends.tolist(), payload_nbytes.tolist()


def frames_of_many(
    scales: NDArray[np.float32],
    payloads: NDArray[np.uint8],
    payload_ends: Addresses,
    heads: Heads,
    *,
    workspace: Workspace,
) -> tuple[Bytes, list[int]]:
    """Makes frames without checksums around given payloads.

    Args:
        scales: float32[n].
        payloads: end to end.
        payload_ends: int64[n], the end of each.
        heads: of the frames.
        workspace: holds the frames.

    Returns:
        The frames end to end, and the end of each.
    """
    ends = np.empty_like(payload_ends)
    workspace.payload.reserve(payloads.size + _room(heads))
    _frame_many(scales, frozen(payloads), payload_ends, heads, workspace.payload.bytes, ends)
    return workspace.payload.bytes, ends.tolist()


def decode_many(
    frames: Bytes,
    ends: Addresses,
    heads: Heads,
    outs: Addresses,
    sizes: Addresses,
    accumulate: NDArray[np.bool_],
    *,
    workspace: Workspace,
) -> list[int]:
    """Stores or adds the values of many frames, whose checksums the caller has verified.

    Args:
        frames: end to end, without their checksums; read-only.
        ends: of each frame.
        heads: the expected heads.
        outs: addresses of the float32 arrays to fill; 0 to check a frame only.
        sizes: of each array.
        accumulate: whether to add, for each.
        workspace: scratch.

    Returns:
        The size of each payload in bytes; 0 for a frame with another head or size, whose array is untouched.
    """
    codes, payload_nbytes = workspace.codes, np.zeros_like(sizes)
    codes.reserve(num_codes_of(int(sizes.max())))
    floats = workspace.floats(np.dtype(np.float32))
    _decode_many(frames, ends, heads, outs, sizes, accumulate, codes.bytes, codes.words_at, floats, payload_nbytes)
    found: list[int] = payload_nbytes.tolist()
    return found


def payloads_of_many(
    frames: Bytes, ends: Addresses, heads: Heads, sizes: Addresses
) -> tuple[Addresses, NDArray[np.float32]]:
    """Returns the offset of each frame's payload, and its scale; 0 for a frame with another head or size.

    Args:
        frames, ends, heads, sizes: as for `decode_many`.
    """
    begins, scales = np.zeros_like(sizes), np.zeros(sizes.size, np.float32)
    _payloads_of_many(frames, ends, heads, sizes, begins, scales)
    return begins, scales


def _room(heads: Heads) -> int:
    """Returns the bytes of all frames without their payloads."""
    return int(np.diff(heads.spans).sum()) + _MORE_NBYTES * len(heads.spans)


@jit
def _scales(given: Any, multipliers: Any, scales: Any) -> bool:
    """Fills `scales` with m = max|v| * multiplier, rounded once; False where one overflows or is NaN."""
    for i in range(scales.size):
        values, factor = _values(given, given.minus, i), given.residual_scales[i]
        if given.residuals[i]:
            largest = largest_magnitude(values, array_at(given.residuals[i], given.sizes[i], ONE), factor)
        else:
            largest = largest_magnitude(values, None, factor)
        product = np.float64(largest) * np.float64(multipliers[i])
        if not product < _OVERFLOW:
            return False
        scales[i] = product
    return True


@jit
def _values(given: Any, minus: Any, i: Any) -> Any:
    """Returns the values of one array, less `minus`."""
    size = given.sizes[i]
    values = array_at(given.values[i], size, ONE)
    if minus is None:
        return values
    subtrahend, differences = array_at(minus[i], size, ONE), given.differences[:size]
    for k in range(size):
        differences[k] = values[k] - subtrahend[k]
    return differences


@jit
def _encode_many(
    given: Any,
    scales: Any,
    heads: Any,
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
    for i in range(scales.size):
        values, factor, m = _values(given, given.minus, i), given.residual_scales[i], scales[i]
        if given.residuals[i]:
            held = array_at(given.residuals[i], given.sizes[i], ONE)
            size = encode_codes(values, held, factor, m, True, codes, words, words_at, scratch, digits)
        else:
            size = encode_codes(values, None, factor, m, True, codes, words, words_at, scratch, digits)
        at = _write_frame(heads, i, m, codes[:size], frames, at)
        ends[i], payload_nbytes[i] = at, size


@jit
def _frame_many(scales: Any, payloads: Any, payload_ends: Any, heads: Any, frames: Any, ends: Any) -> None:
    at: Any = 0
    for i in range(scales.size):
        payload = payloads[payload_ends[i - 1] if i else 0 : payload_ends[i]]
        ends[i] = at = _write_frame(heads, i, scales[i], payload, frames, at)


@jit
def _write_frame(heads: Any, i: Any, scale: Any, payload: Any, frames: Any, at: Any) -> Any:
    """Writes a frame without checksum: head, one scale, the payload's size, seven bits a byte, and the payload."""
    for byte in heads.data[heads.spans[i, 0] : heads.spans[i, 1]]:
        frames[at] = byte
        at += 1
    frames[at] = 1
    bits, size = np.uint32(magnitude_bits(scale)), payload.size  # a scale is never negative
    for place in range(4):
        frames[at + 1 + place] = (bits >> np.uint32(8 * place)) & np.uint32(0xFF)
    at += 5
    while size >= 0x80:
        frames[at] = size & 0x7F | 0x80
        size >>= 7
        at += 1
    frames[at] = size
    copy(payload, frames[at + 1 :])
    return at + 1 + payload.size


@jit
def _payloads_of_many(frames: Any, ends: Any, heads: Any, sizes: Any, begins: Any, scales: Any) -> None:
    for i in range(sizes.size):
        first = ends[i - 1] if i else 0
        begin, scale = _begin_of_payload(frames[first : ends[i]], heads, i, (sizes[i] + 4) // 5)
        if begin:
            begins[i], scales[i] = first + begin, scale


@jit
def _decode_many(
    frames: Any,
    ends: Any,
    heads: Any,
    outs: Any,
    sizes: Any,
    accumulate: Any,
    codes: Any,
    words_at: Any,
    floats: Any,
    payload_nbytes: Any,
) -> None:
    for i in range(sizes.size):
        frame = frames[ends[i - 1] if i else 0 : ends[i]]
        begin, scale = _begin_of_payload(frame, heads, i, (sizes[i] + 4) // 5)
        if begin:
            payload_nbytes[i] = frame.size - begin
        if begin and outs[i]:
            out = array_at(outs[i], sizes[i], ONE)
            decode_codes(frame[begin:], True, scale, accumulate[i], codes, words_at, floats, out)


@jit
def _begin_of_payload(frame: Any, heads: Any, i: Any, num_codes: Any) -> Any:
    """Returns the offset of a frame's payload, and its scale; (0, 0) for a frame with another head or size."""
    begin, scale = _end_of_numbers(frame, heads.data[heads.spans[i, 0] : heads.spans[i, 1]])
    return (begin, scale) if begin and count_expanded(frame[begin:]) == num_codes else (0, np.float32(0))


@jit
def _end_of_numbers(frame: Any, head: Any) -> Any:
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
    # The payload's size, in at most four bytes here.
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
