"""3LC of a batch, all stages: floats to payloads with the residuals kept, payload to floats.

As on the CPU, encoding reads the data twice: the largest magnitudes first, then a pass that leaves v - m*q in the
residuals and makes base-3^5 codes. Nothing waits for the host in between: whether a tensor may be touched is decided
on the device. Payloads are checked on the host, where they come from, before anything is written.

Zero runs (3LC, section 3.3) do not care where blocks end. All that a block must know of those before it is how many
codes the run that reaches into it has, modulo 14: its quantiser noted the last code of the block that is no zero, and a
running maximum over the blocks says where the run began. From there every zero knows its position in its run, hence
whether a byte is written there and which; a running sum of the bytes written says where. So the join over block borders
is exact and the bytes are those of the serial encoder. Decoding: a running sum of what bytes expand to says where each
literal goes, over a ground of zero codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from thinwire.kernels.contract import (
    FIRST_RUN,
    LONGEST_RUN,
    ZERO_CODE,
    check_codes,
    check_layout,
    check_length,
    check_scale,
    num_codes_of,
)
from thinwire.kernels.numba.jit import frozen
from thinwire.kernels.numba.zero_run import num_expanded
from thinwire.kernels.triton.batch import (
    NUMPY_TYPES,
    Batch,
    Given,
    Pending,
    Tables,
    allow,
    byte_span,
    encoding,
    find_start,
    load_sum,
    num_values,
    store_residual,
)
from thinwire.kernels.triton.dense import put_digit
from thinwire.kernels.triton.workspace import DeviceWorkspace

_ZERO, _RUN, _LONGEST = tl.constexpr(ZERO_CODE), tl.constexpr(FIRST_RUN), tl.constexpr(LONGEST_RUN)
_BLOCK = 1024  # codes, or bytes of payload, per program in decoding
_ZERO_RUN_WARPS = 4
_LOOK = tl.constexpr(256)  # blocks that are looked back at in one go


def encode_ternary(
    values: Sequence[torch.Tensor],
    *,
    sparsity: float,
    layout: str = "stride",
    zero_run: bool = True,
    paper_literal: bool = False,
    **given: Unpack[Given],
) -> Pending:
    """Encodes a batch as `thinwire.kernels.encode_ternary` does each tensor: same bytes, same residual bits.

    Args:
        values: float32[n] or float64[n] each, all of one type, contiguous, n > 0; never written.
        residuals: of the same sizes, updated in place; None: nothing is kept.
        together: leave all residuals alone if one tensor is refused, not only its own.
        workspace: not to be used again before `finish` was called.

    The other arguments are those of `thinwire.kernels.encode_ternary`.

    Returns:
        The payloads to come. A tensor with NaN or Inf, or whose scale overflows, is marked there; its residual is bit
        for bit what it was.
    """
    check_layout(layout)
    with encoding(values, per_byte=5, **given) as batch:
        workspace, largest = batch.workspace, batch.largest()
        scales = largest * sparsity
        codes = workspace.array("ternary.codes", batch.num_bytes, torch.uint8)
        last_nonzero = workspace.array("ternary.last", batch.num_blocks, torch.int64)
        _quantise[(batch.num_blocks,)](
            scales,
            allow(largest, scales, together=given.get("together", False)),
            codes,
            last_nonzero,
            PAD=0 if paper_literal else 1,
            PARTITION=layout == "partition",
            **batch.launch,
        )
        if not zero_run:
            return Pending(batch, largest=largest, scales=scales, payload=codes)
        payload, ends = _zero_run_encode(batch, codes, last_nonzero)
        return Pending(batch, largest=largest, scales=scales, payload=payload, ends=ends)


def decode_ternary(
    payload: Any,
    *,
    scale: float,
    out: torch.Tensor,
    layout: str = "stride",
    zero_run: bool = True,
    accumulate: bool = False,
    workspace: DeviceWorkspace,
) -> None:
    """``out = scale * q``, or ``out += scale * q``, as `thinwire.kernels.decode_ternary` does it; does not wait.

    Args:
        out: float32[n] or float64[n], contiguous, n > 0.
        workspace: of out's device; its next use must `synchronize` first.

    Raises:
        FrameError: the payload does not hold exactly ceil(n / 5) valid codes, or the scale is no finite number >= 0.
            `out` is untouched.
    """
    check_layout(layout)
    check_scale(scale, NUMPY_TYPES[out.dtype])
    received = np.frombuffer(payload, dtype=np.uint8)
    num_codes = num_codes_of(out.numel())
    if zero_run:
        check_length(num_expanded(frozen(received)), num_codes)
    else:
        check_codes(received, out.numel())
    with workspace.decoding():
        if zero_run:
            codes = _zero_run_decode(received, num_codes, workspace)
        else:
            codes = workspace.upload("ternary.received", received)
        _dequantise[(-(-num_codes // _BLOCK),)](
            codes,
            torch.full((1,), scale, dtype=out.dtype, device=out.device),
            out,
            out.numel(),
            num_codes,
            PARTITION=layout == "partition",
            ACCUMULATE=accumulate,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )


def _zero_run_encode(
    batch: Batch, codes: torch.Tensor, last_nonzero: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces runs of zero codes, each tensor's for itself.

    Args:
        batch: the codes' tensors, PER_BYTE = 5.
        codes: uint8[batch.num_bytes], the codes of all tensors one behind the other.
        last_nonzero: int64[batch.num_blocks], where in `codes` the block's last code other than 121 is, or -1.

    Returns:
        The payloads, one behind the other, and int64[num_tensors] where each ends; views into the workspace.
    """
    workspace, num_blocks = batch.workspace, batch.num_blocks
    counts = workspace.array("zero_run.counts", num_blocks, torch.int64)
    _count[(num_blocks,)](codes, last_nonzero, counts, batch.tables, num_warps=_ZERO_RUN_WARPS)
    ends = workspace.array("zero_run.ends", num_blocks, torch.int64)
    torch.cumsum(counts, 0, out=ends)
    payload = workspace.array("zero_run.payload", batch.num_bytes, torch.uint8)
    _write[(num_blocks,)](codes, last_nonzero, ends, payload, batch.tables, num_warps=_ZERO_RUN_WARPS)
    return payload, ends[batch.last_blocks]


def _zero_run_decode(payload: NDArray[np.uint8], num_codes: int, workspace: DeviceWorkspace) -> torch.Tensor:
    """The codes that a payload stands for, uint8[num_codes] in the workspace.

    The caller has checked that the payload expands to exactly `num_codes` codes: kernels trust it.
    """
    received = workspace.upload("zero_run.received", payload)
    codes = workspace.array("zero_run.codes", num_codes, torch.uint8).fill_(ZERO_CODE)
    num_blocks = -(-payload.size // _BLOCK)
    counts = workspace.array("zero_run.counts", num_blocks, torch.int64)
    _expand[(num_blocks,)](received, payload.size, counts, BLOCK=_BLOCK)
    ends = workspace.array("zero_run.ends", num_blocks, torch.int64)
    torch.cumsum(counts, 0, out=ends)
    _place[(num_blocks,)](received, payload.size, ends, codes, BLOCK=_BLOCK)
    return codes


@triton.jit
def place_value(place: tl.tensor) -> tl.tensor:
    """What a digit in base 3 is worth at places 0 … 4, the highest first; 1 behind them."""
    return tl.where(place == 0, 81, tl.where(place == 1, 27, tl.where(place == 2, 9, tl.where(place == 3, 3, 1))))


@triton.jit
def _quantise(
    scales: tl.tensor,
    allowed: tl.tensor,
    codes: tl.tensor,
    last_nonzero: tl.tensor,
    batch: Tables,
    PAD: tl.constexpr,
    PARTITION: tl.constexpr,
) -> None:
    tensor, start = find_start(batch)
    m = tl.load(scales + tensor)
    half = m * 0.5  # exact; a division would be an approximate one
    at = tl.arange(0, batch.BLOCK)
    num_codes, first = byte_span(batch, tensor)
    left = num_codes - start
    size = num_values(batch, tensor)
    byte = tl.zeros([batch.BLOCK], tl.int32)
    # One place of all codes at a time: every lane has a value to work on, and none asks its neighbours for digits.
    for place in tl.static_range(5):
        if PARTITION:
            before, apart = place * num_codes + start, 1
            count = tl.minimum(size - before, left)
        else:
            before, apart = 5 * start + place, 5
            count = (size - before + 4) // 5
        known = at < tl.minimum(count, batch.BLOCK).to(tl.int32)
        v = load_sum(batch, tensor, before, apart * at, known)
        byte = 3 * byte + tl.where(known, tl.where(v > half, 2, tl.where(v < -half, 0, 1)), PAD)
    if batch.RESIDUAL:
        # Values again, now by rows of neighbours, and from the cache: five places apart, residuals would reach memory
        # one by one, which takes twice as long as all of this.
        tl.debug_barrier()
        for row in tl.static_range(5):
            if PARTITION:
                before = row * num_codes + start
                count = tl.minimum(size - before, left)
            else:
                before = 5 * start + row * batch.BLOCK
                count = size - before
            known = at < tl.minimum(count, batch.BLOCK).to(tl.int32)
            v = load_sum(batch, tensor, before, at, known)
            unsent = v - tl.where(v > half, m, tl.where(v < -half, -m, 0.0))
            store_residual(batch, tensor, before, at, known, allowed, unsent)
    inside = at < tl.minimum(left, batch.BLOCK).to(tl.int32)
    tl.store(codes + (first + start) + at, byte.to(tl.uint8), mask=inside)
    last = tl.max(tl.where(inside & (byte != _ZERO), at, -1), axis=0)
    tl.store(last_nonzero + tl.program_id(0), tl.where(last >= 0, first + start + last, -1))


@triton.jit
def _dequantise(
    codes: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    num_codes: tl.tensor,
    PARTITION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    m = tl.load(scale)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if (not PARTITION) and 5 * (first + BLOCK) <= size:  # neighbouring values are written as one where none is masked
        decode_rows(codes, m, out, size, num_codes, first, PARTITION, ACCUMULATE, BLOCK, True)
    else:
        decode_rows(codes, m, out, size, num_codes, first, PARTITION, ACCUMULATE, BLOCK, False)


@triton.jit
def decode_rows(
    codes: tl.tensor,
    m: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    num_codes: tl.tensor,
    first: tl.tensor,
    PARTITION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Writes what BLOCK codes from `first` on stand for, BLOCK neighbouring values at once; WHOLE: none is missing."""
    at = tl.arange(0, BLOCK)
    for row in tl.static_range(5):
        if PARTITION:
            place, code = 4 - row + tl.zeros([BLOCK], tl.int32), at
            before = row * num_codes.to(tl.int64) + first
            count = tl.minimum(size - before, num_codes - first)
        else:
            place, code = 4 - (row * BLOCK + at) % 5, (row * BLOCK + at) // 5
            before = 5 * first + row * BLOCK
            count = size - before
        known = None if WHOLE else at < tl.minimum(count, BLOCK).to(tl.int32)
        byte = tl.load(codes + first + code, mask=known, other=None if WHOLE else 0).to(tl.int32)
        # byte / 243, rounded up to a 256th, has the digits in base 3 behind its point (see `unpack`).
        fraction = (1079 * byte + 1024) >> 10
        digit = (((fraction * place_value(place)) & 255) * 3) >> 8
        put_digit(out + before, at, digit, m, known, ACCUMULATE)


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


@triton.jit
def _last_before(last_nonzero: tl.tensor, first_block: tl.tensor) -> tl.tensor:
    """Where the last code before this block is that is no zero, or -1; most often the block before has it."""
    end = tl.program_id(0).to(tl.int64)
    found = tl.load(last_nonzero + end - 1, mask=end > first_block, other=-1)
    while (found < 0) & (end > first_block):
        block = end - 1 - tl.arange(0, _LOOK)
        found = tl.max(tl.load(last_nonzero + block, mask=block >= first_block, other=-1), axis=0)
        end -= _LOOK
    return found


@triton.jit
def _bytes_to_write(codes: tl.tensor, last_nonzero: tl.tensor, batch: Tables) -> tl.tensor:
    """Of each code of the block: whether a byte is written there, and which."""
    tensor, start = find_start(batch)
    num_codes, first = byte_span(batch, tensor)
    before = tl.maximum(_last_before(last_nonzero, tl.program_id(0) - start // batch.BLOCK), first - 1)
    # Zeros that reach into this block: those behind the last other code, or behind the tensor's beginning.
    carried = ((first + start - 1 - before) % _LONGEST).to(tl.int32)
    at = tl.arange(0, batch.BLOCK)
    left = tl.minimum(num_codes - start, batch.BLOCK + 1).to(tl.int32)
    inside = at < left
    here = codes + (first + start)
    byte = tl.load(here + at, mask=inside, other=0).to(tl.int32)
    following = tl.load(here + at + 1, mask=at + 1 < left, other=0).to(tl.int32)
    zero = inside & (byte == _ZERO)
    last = tl.associative_scan(tl.where(zero, -1 - carried, at), 0, _larger)
    rest = (at - last) % _LONGEST
    written = inside & ((byte != _ZERO) | (rest == 0) | (following != _ZERO))
    run = tl.where(rest == 0, 255, tl.where(rest == 1, _ZERO, _RUN - 2 + rest))
    return written.to(tl.int32), tl.where(zero, run, byte).to(tl.uint8)


@triton.jit
def _count(codes: tl.tensor, last_nonzero: tl.tensor, counts: tl.tensor, batch: Tables) -> None:
    written, _ = _bytes_to_write(codes, last_nonzero, batch)
    tl.store(counts + tl.program_id(0), tl.sum(written, axis=0).to(tl.int64))


@triton.jit
def _write(codes: tl.tensor, last_nonzero: tl.tensor, ends: tl.tensor, payload: tl.tensor, batch: Tables) -> None:
    written, value = _bytes_to_write(codes, last_nonzero, batch)
    program = tl.program_id(0)
    start = tl.load(ends + program - 1, mask=program > 0, other=0)
    tl.store(payload + start + (tl.cumsum(written, axis=0) - 1), value, mask=written != 0)


@triton.jit
def _expansion(received: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The block's bytes, and how many codes each of them stands for (0 behind the end)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(received + at, mask=at < size, other=0).to(tl.int32)
    return byte, tl.where(at < size, tl.where(byte >= _RUN, byte - (_RUN - 2), 1), 0)


@triton.jit
def _expand(received: tl.tensor, size: tl.tensor, counts: tl.tensor, BLOCK: tl.constexpr) -> None:
    _, count = _expansion(received, size, BLOCK)
    tl.store(counts + tl.program_id(0), tl.sum(count, axis=0).to(tl.int64))


@triton.jit
def _place(received: tl.tensor, size: tl.tensor, ends: tl.tensor, codes: tl.tensor, BLOCK: tl.constexpr) -> None:
    byte, count = _expansion(received, size, BLOCK)
    program = tl.program_id(0)
    start = tl.load(ends + program - 1, mask=program > 0, other=0)
    at = start + tl.cumsum(count, axis=0) - count
    tl.store(codes + at, byte.to(tl.uint8), mask=(count == 1) & (byte < _RUN))
