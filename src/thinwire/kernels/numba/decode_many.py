"""Frames of many small 3LC arrays in one call: what `many` made, stored or added.

A received frame is checked here, all but its checksum, against the head that is expected of it. One that is anything
else is left to the caller: it may be right, of another codec, or damaged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Bytes, num_codes_of
from thinwire.kernels.numba.addresses import ONE, Addresses, array_at
from thinwire.kernels.numba.base243 import _TRITS, Workspace, _add_sparse, _add_stride, _fill_table, _store_stride
from thinwire.kernels.numba.jit import float_of_bits, jit
from thinwire.kernels.numba.ternary import SPARSE_BELOW
from thinwire.kernels.numba.zero_run import _decode, _expanded

_ADDED, _STORED = np.float32(-0.0), np.float32(0.0)  # adding -0.0 changes no bit of any number


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


def payloads_of_many(
    frames: Bytes, ends: Addresses, heads: Bytes, head_spans: Addresses, sizes: Addresses
) -> tuple[Addresses, NDArray[np.float32]]:
    """Where the payload of each frame begins, and its scale; 0 for a frame that is not the one expected.

    Args:
        frames, ends, heads, head_spans, sizes: as for `decode_many`.
    """
    begins, scales = np.zeros_like(sizes), np.zeros(sizes.size, np.float32)
    _payloads_of_many(frames, ends, heads, head_spans, sizes, begins, scales)
    return begins, scales


@jit
def _payloads_of_many(
    frames: Any, ends: Any, heads: Any, head_spans: Any, sizes: Any, begins: Any, scales: Any
) -> None:
    for i in range(sizes.size):
        first = ends[i - 1] if i else 0
        head = heads[head_spans[i, 0] : head_spans[i, 1]]
        begin, scale = begin_of_payload(frames[first : ends[i]], head, (sizes[i] + 4) // 5)
        if begin:
            begins[i], scales[i] = first + begin, scale


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
        num_codes = (sizes[i] + 4) // 5
        begin, scale = begin_of_payload(frame, head, num_codes)
        if not begin:
            continue
        payload_nbytes[i] = frame.size - begin
        if not outs[i]:
            continue
        payload, out = frame[begin:], array_at(outs[i], sizes[i], ONE)
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
def begin_of_payload(frame: Any, head: Any, num_codes: Any) -> Any:
    """Where a frame's payload begins, and its one scale; (0, 0) for a frame that is not the one expected."""
    begin, scale = _begin_of_payload(frame, head)
    return (begin, scale) if begin and _expanded(frame[begin:]) == num_codes else (0, np.float32(0))


@jit
def _begin_of_payload(frame: Any, head: Any) -> Any:
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
