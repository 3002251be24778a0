"""3LC of a batch, all stages: floats to payloads with the residuals kept, payload to floats.

As on the CPU, encoding reads the data twice: the largest magnitudes first, then a pass that leaves v - m*q in the
residuals and makes base-3^5 codes. Nothing waits for the host in between: whether a tensor may be touched is decided
on the device. Payloads are checked on the host, where they come from, before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from thinwire.kernels.contract import ZERO_CODE, check_codes, check_layout, check_length, check_scale, num_codes_of
from thinwire.kernels.numba.jit import frozen
from thinwire.kernels.numba.zero_run import num_expanded
from thinwire.kernels.triton.batch import NUMPY_TYPES, Batch, Tables, byte_span, find_block, load_block, store_residual
from thinwire.kernels.triton.dense import put
from thinwire.kernels.triton.pending import Pending, allow
from thinwire.kernels.triton.workspace import DeviceWorkspace
from thinwire.kernels.triton.zero_run import zero_run_decode, zero_run_encode

_ZERO = tl.constexpr(ZERO_CODE)
_BLOCK = 1024  # codes per program, in decoding


def encode_ternary(
    values: Sequence[torch.Tensor],
    *,
    sparsity: float,
    layout: str = "stride",
    zero_run: bool = True,
    paper_literal: bool = False,
    residuals: Sequence[torch.Tensor] | None = None,
    residual_scale: float = 1.0,
    together: bool = False,
    workspace: DeviceWorkspace,
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
    partition = layout == "partition"
    workspace.follow()
    with workspace.running():
        batch = Batch(values, residuals, residual_scale=residual_scale, per_byte=5, workspace=workspace)
        largest = batch.largest(partition=partition)
        scales = largest * sparsity
        codes = workspace.array("ternary.codes", batch.num_bytes, torch.uint8)
        last_nonzero = workspace.array("ternary.last", batch.num_blocks, torch.int64)
        _quantise[(batch.num_blocks,)](
            scales,
            allow(largest, scales, together=together),
            codes,
            last_nonzero,
            PAD=0 if paper_literal else 1,
            PARTITION=partition,
            **batch.launch,
        )
        if not zero_run:
            return Pending(batch, largest=largest, scales=scales, payload=codes)
        payload, ends = zero_run_encode(batch, codes, last_nonzero)
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
    workspace.follow()
    with workspace.running():
        if zero_run:
            codes = zero_run_decode(received, num_codes, workspace)
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
    workspace.join()


@triton.jit
def place_value(place: tl.tensor) -> tl.tensor:
    """What a digit in base 3 is worth at places 0 … 4, the highest first; 1 behind them."""
    return tl.where(place == 0, 81, tl.where(place == 1, 27, tl.where(place == 2, 9, tl.where(place == 3, 3, 1))))


@triton.jit
def put_digit(
    out: tl.tensor, at: tl.tensor, digit: tl.tensor, m: tl.tensor, known: tl.tensor, ACCUMULATE: tl.constexpr
) -> None:
    """``out = m·(digit − 1)``, or ``out +=``, which changes no bit where the digit is 1."""
    if ACCUMULATE:
        known = known & (digit != 1)
    put(out, at, tl.where(digit == 2, m, tl.where(digit == 0, -m, 0.0)), known, ACCUMULATE)


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
    tensor, code = find_block(batch)
    index, known, v = load_block(batch, tensor, code, PARTITION)
    m = tl.load(scales + tensor)
    half = m * 0.5  # exact; a division would be an approximate one
    above, below = v > half, v < -half
    if batch.RESIDUAL:
        unsent = v - tl.where(above, m, tl.where(below, -m, 0.0))
        store_residual(batch, tensor, index, known, allowed, unsent)
    digit = tl.where(known, tl.where(above, 2, tl.where(below, 0, 1)), PAD)
    place = tl.arange(0, batch.WIDTH)
    weight = tl.where(place < batch.PER_BYTE, place_value(place), 0)
    byte = tl.sum(digit * weight[None, :], axis=1)
    num_codes, first = byte_span(batch, tensor)
    inside = code < num_codes
    tl.store(codes + first + code, byte.to(tl.uint8), mask=inside)
    last = tl.max(tl.where(inside & (byte != _ZERO), first + code, -1), axis=0)
    tl.store(last_nonzero + tl.program_id(0), last)


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
    at = tl.arange(0, BLOCK)
    # Neighbouring lanes write neighbouring values: with the stride layout, BLOCK values at a time of the block's five
    # times as many; with the partition layout, one place at a time.
    for turn in tl.static_range(5):
        if PARTITION:
            place = tl.full([BLOCK], turn, tl.int32)
            code = first + at
            index = tl.full([BLOCK], turn, tl.int64) * num_codes + code
        else:
            place = (turn * BLOCK + at) % 5
            code = first + (turn * BLOCK + at) // 5
            index = 5 * first + turn * BLOCK + at
        known = (code < num_codes) & (index < size)
        byte = tl.load(codes + code, mask=known, other=0).to(tl.int32)
        power = place_value(4 - place)
        # byte / 243, rounded up to a 256th, has the digits in base 3 behind its point (see `unpack`).
        fraction = (1079 * byte + 1024) >> 10
        digit = (((fraction * power) & 255) * 3) >> 8
        put_digit(out, index, digit, m, known, ACCUMULATE)
