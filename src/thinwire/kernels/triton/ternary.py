"""3LC of a batch, floats and residuals to payloads; `ternary_decode` decodes.

As on the CPU, encoding reads the data twice: the largest magnitudes first, then a pass that leaves v - m*q in the
residuals and makes base-3^5 codes. No step waits for the host in between: the device decides whether a tensor may be
changed.

Zero runs (3LC, section 3.3) may cross blocks. A block needs only one number from earlier blocks: the length, modulo 14,
of the run that reaches into it. Every block's quantiser notes its last code other than zero; the last such code before
a block gives the start of the run. The start gives the position of every zero in its run, hence the byte to write, if
any; a running sum of the written bytes gives its place. The join over block borders is therefore exact, and the bytes
are those of the serial encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
import triton
import triton.language as tl

from thinwire.kernels.contract import FIRST_RUN, LONGEST_RUN, ZERO_CODE
from thinwire.kernels.triton.batch import (
    Arrays,
    Batch,
    Given,
    Pending,
    Tables,
    byte_span,
    encoding,
    find_start,
    load_sum,
    may_change,
    num_values,
    store_residual,
)

_ZERO, _RUN, _LONGEST = tl.constexpr(ZERO_CODE), tl.constexpr(FIRST_RUN), tl.constexpr(LONGEST_RUN)
_ZERO_RUN_WARPS = 2
WINDOW = tl.constexpr(256)  # blocks, or windows of blocks, in one step of looking back


def encode_ternary(
    values: Sequence[torch.Tensor] | Arrays,
    *,
    sparsity: float,
    **given: Unpack[Given],
) -> Pending:
    """Encodes a batch as `thinwire.kernels.numba.encode_ternary` does each tensor: same bytes, same residual bits.

    Args:
        values: float32[n] or float64[n] each, all of one type, contiguous, n > 0; never written.
        residuals: of the same sizes, updated in place; None: no residuals.
        together: if one tensor is refused, leave all residuals unchanged, not only its own.
        workspace: not to be used again before `finish` was called.

    The other arguments are those of `thinwire.kernels.numba.encode_ternary`.

    Returns:
        The pending payloads. They mark a tensor with NaN, Inf or an overflowing scale, whose residual is unchanged, bit
        for bit.
    """
    with encoding(values, per_byte=5, **given) as batch:
        workspace, largest = batch.workspace, batch.largest()
        scales = largest * sparsity
        codes = workspace.array("ternary.codes", batch.num_bytes, torch.uint8)
        _room_for_runs(batch)
        num_windows = -(-batch.num_blocks // WINDOW.value)
        # For every window of blocks, then for every block: the place of its last code other than zero.
        last_nonzero = workspace.array("ternary.last", num_windows + batch.num_blocks, torch.int64)
        last_nonzero[:num_windows].fill_(-1)
        _quantise[(batch.num_blocks,)](
            scales,
            may_change(largest, scales, together=given.get("together", False)),
            codes,
            last_nonzero,
            num_windows,
            **batch.launch,
        )
        payload, ends = _zero_run_encode(batch, codes, last_nonzero, num_windows)
        return Pending(batch, largest=largest, scales=scales, payload=payload, ends=ends)


def _room_for_runs(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns memory for `_zero_run_encode`; taken before a residual is written, because memory may run out."""
    workspace, num_blocks = batch.workspace, batch.num_blocks
    return (
        workspace.array("zero_run.counts", num_blocks, torch.int64),
        workspace.array("zero_run.ends", num_blocks, torch.int64),
        workspace.array("zero_run.payload", batch.num_bytes, torch.uint8),
    )


def _zero_run_encode(
    batch: Batch, codes: torch.Tensor, last_nonzero: torch.Tensor, num_windows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces runs of zero codes, separately for each tensor.

    Args:
        batch: the codes' tensors, PER_BYTE = 5.
        codes: uint8[batch.num_bytes], the codes of all tensors end to end.
        last_nonzero: int64[num_windows + batch.num_blocks], for every window of blocks and then for every block, the
            place in `codes` of its last code other than 121, or -1.
        num_windows: number of windows.

    Returns:
        The payloads end to end, and the end of each, int64[num_tensors]; views into the workspace.
    """
    num_blocks, (counts, ends, payload) = batch.num_blocks, _room_for_runs(batch)
    _count[(num_blocks,)](codes, last_nonzero, num_windows, counts, batch.tables, num_warps=_ZERO_RUN_WARPS)
    torch.cumsum(counts, 0, out=ends)
    _write[(num_blocks,)](codes, last_nonzero, num_windows, ends, payload, batch.tables, num_warps=_ZERO_RUN_WARPS)
    return payload, ends[batch.last_blocks]


@triton.jit
def place_value(place: tl.tensor) -> tl.tensor:
    """Returns the value of base-3 digit 1 at places 0 … 4, the highest first; 1 behind them."""
    return tl.where(place == 0, 81, tl.where(place == 1, 27, tl.where(place == 2, 9, tl.where(place == 3, 3, 1))))


@triton.jit(do_not_specialize=["num_windows"])
def _quantise(
    scales: tl.tensor,
    allowed: tl.tensor,
    codes: tl.tensor,
    last_nonzero: tl.tensor,
    num_windows: tl.tensor,
    batch: Tables,
) -> None:
    tensor, start = find_start(batch)
    m = tl.load(scales + tensor)
    half = m * 0.5  # exact; a division would be approximate
    at = tl.arange(0, batch.BLOCK)
    num_codes, first = byte_span(batch, tensor)
    left = num_codes - start
    size = num_values(batch, tensor)
    byte = tl.zeros([batch.BLOCK], tl.int32)
    # One place of all codes at a time: every lane has a value, and no lane needs digits of its neighbours.
    for place in tl.static_range(5):
        before = 5 * start + place
        known = at < tl.minimum((size - before + 4) // 5, batch.BLOCK).to(tl.int32)
        v = load_sum(batch, tensor, before, 5 * at, known)
        byte = 3 * byte + tl.where(known, tl.where(v > half, 2, tl.where(v < -half, 0, 1)), 1)
    if batch.RESIDUAL:
        # Reads the values again, as rows of neighbours, from the cache: five places apart, residuals would be written
        # to memory one by one, which takes twice as long as this pass.
        tl.debug_barrier()
        for row in tl.static_range(5):
            before = 5 * start + row * batch.BLOCK
            known = at < tl.minimum(size - before, batch.BLOCK).to(tl.int32)
            v = load_sum(batch, tensor, before, at, known)
            unsent = v - tl.where(v > half, m, tl.where(v < -half, -m, 0.0))
            store_residual(batch, tensor, before, at, known, allowed, unsent)
    inside = at < tl.minimum(left, batch.BLOCK).to(tl.int32)
    tl.store(codes + (first + start) + at, byte.to(tl.uint8), mask=inside)
    last = tl.max(tl.where(inside & (byte != _ZERO), at, -1), axis=0)
    if last >= 0:
        program = tl.program_id(0)
        tl.atomic_max(last_nonzero + program // WINDOW, first + start + last, sem="relaxed")
        tl.store(last_nonzero + num_windows + program, first + start + last)
    else:
        tl.store(last_nonzero + num_windows + tl.program_id(0), -1)


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


@triton.jit
def _last_before(last_nonzero: tl.tensor, num_windows: tl.tensor, first_block: tl.tensor) -> tl.tensor:
    """Returns the place of the last code other than zero before this block, or before the tensor.

    It is mostly in the previous block; if not, the search covers this block's window, then the windows before it, so
    that a tensor of zeros takes few steps too.
    """
    program = tl.program_id(0)
    found = tl.load(last_nonzero + num_windows + program - 1, mask=program > first_block, other=-1)
    window = program // WINDOW
    if found < 0:
        block = window * WINDOW + tl.arange(0, WINDOW)
        found = tl.max(tl.load(last_nonzero + num_windows + block, mask=block < program, other=-1), axis=0)
    while (found < 0) & (window * WINDOW > first_block):
        before = window - 1 - tl.arange(0, WINDOW)
        found = tl.max(tl.load(last_nonzero + before, mask=before >= 0, other=-1), axis=0)
        window -= WINDOW
    return found


@triton.jit
def _bytes_to_write(codes: tl.tensor, last_nonzero: tl.tensor, num_windows: tl.tensor, batch: Tables) -> tl.tensor:
    """Returns for each code of the block whether it writes a byte, and the byte."""
    tensor, start = find_start(batch)
    num_codes, first = byte_span(batch, tensor)
    before = tl.maximum(_last_before(last_nonzero, num_windows, tl.program_id(0) - start // batch.BLOCK), first - 1)
    # Zeros that reach into this block: those after the last other code, or after the tensor's start.
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


@triton.jit(do_not_specialize=["num_windows"])
def _count(codes: tl.tensor, last_nonzero: tl.tensor, num_windows: tl.tensor, counts: tl.tensor, batch: Tables) -> None:
    written, _ = _bytes_to_write(codes, last_nonzero, num_windows, batch)
    tl.store(counts + tl.program_id(0), tl.sum(written, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["num_windows"])
def _write(
    codes: tl.tensor,
    last_nonzero: tl.tensor,
    num_windows: tl.tensor,
    ends: tl.tensor,
    payload: tl.tensor,
    batch: Tables,
) -> None:
    written, value = _bytes_to_write(codes, last_nonzero, num_windows, batch)
    program = tl.program_id(0)
    start = tl.load(ends + program - 1, mask=program > 0, other=0)
    tl.store(payload + start + (tl.cumsum(written, axis=0) - 1), value, mask=written != 0)
