"""`onebit` of a batch: the sign of every value, and one scale from sums over the tensor (DoubleSqueeze §5.1).

Sums of floats depend on their order, and the scale travels, so the order is the CPU's (see `thinwire.kernels.moments`):
1,024 running sums stand side by side, value i goes to sum i mod 1,024, and they are folded in halves. A program
keeps 32 of the sums, so that 32 programs share a tensor; each adds row after row and loads eight rows ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import triton
import triton.language as tl

from thinwire.kernels.gpu.batch import Batch, byte_span, find_block, find_values, load_sum, num_values, store_residual
from thinwire.kernels.gpu.pending import Pending, allow
from thinwire.kernels.gpu.workspace import DeviceWorkspace

_LANES = tl.constexpr(1024)
_GROUP = 32  # sums per program
_AHEAD = tl.constexpr(8)  # rows
_BLOCK = 4096  # values per program, in decoding


def encode_signs(
    values: Sequence[torch.Tensor],
    *,
    norm: Literal["l2", "l1"],
    residuals: Sequence[torch.Tensor] | None = None,
    residual_scale: float = 1.0,
    together: bool = False,
    workspace: DeviceWorkspace,
) -> Pending:
    """Encodes a batch: a bit is set where v >= 0, and stands for ±scale, scale = ‖v‖₂ / √n or ‖v‖₁ / n.

    Args and returns as `thinwire.kernels.gpu.ternary.encode_ternary`.
    """
    workspace.follow()
    with workspace.running():
        batch = Batch(values, residuals, residual_scale=residual_scale, per_byte=8, workspace=workspace)
        largest = batch.largest()
        scales = _scales(batch, largest, norm)
        bits = workspace.array("signs.bits", batch.num_bytes, torch.uint8)
        allowed = allow(batch, largest, scales, together=together)
        _pack[(batch.num_blocks,)](scales, allowed, bits, **batch.launch)
        return Pending(batch, largest=largest, scales=scales, payload=bits)


def decode_signs(
    payload: Any,
    *,
    low: float,
    high: float,
    out: torch.Tensor,
    accumulate: bool = False,
    workspace: DeviceWorkspace,
) -> None:
    """``out = high`` where a bit is set, else `low`; or adds them; does not wait."""
    workspace.follow()
    with workspace.running():
        _unpack[(-(-out.numel() // _BLOCK),)](
            workspace.upload("signs.received", np.frombuffer(payload, np.uint8)),
            torch.full((1,), low, dtype=out.dtype, device=out.device),
            torch.full((1,), high, dtype=out.dtype, device=out.device),
            out,
            out.numel(),
            ACCUMULATE=accumulate,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )
    workspace.join()


def _scales(batch: Batch, largest: torch.Tensor, norm: str) -> torch.Tensor:
    """The scale of each tensor, in its type, never above its largest magnitude."""
    unit = _units(largest)
    sums = batch.workspace.array("signs.sums", 2 * batch.num_tensors * _LANES.value, torch.float64)
    _sum[(_LANES.value // _GROUP, batch.num_tensors)](
        1.0 / unit,
        sums,
        **{name: batch.launch[name] for name in ("table", "stride", "residual_scale", "DTYPE", "RESIDUAL")},
        L1=norm == "l1",
        GROUP=_GROUP,
        num_warps=1,
        enable_fp_fusion=False,
    )
    folded = sums.view(2, batch.num_tensors, _LANES.value)
    while folded.shape[2] > 1:
        half = folded.shape[2] // 2
        folded = folded[..., :half] + folded[..., half:]
    mean = (folded[0, :, 0] - folded[1, :, 0]) / batch.sizes.to(torch.float64)
    scale = (mean if norm == "l1" else torch.sqrt(mean)) * unit
    return torch.minimum(scale.to(batch.dtype), largest)


def _units(largest: torch.Tensor) -> torch.Tensor:
    """A power of two near each magnitude, so that float64 sums do not overflow; 1 for float32."""
    if largest.dtype == torch.float32:
        return torch.ones_like(largest, dtype=torch.float64)
    exponent = (largest.view(torch.int64) >> 52) - 1022
    return ((exponent.clamp(-1000, 1000) + 1023) << 52).view(torch.float64)


@triton.jit
def _sum(
    lift: tl.tensor,
    sums: tl.tensor,
    table: tl.tensor,
    stride: tl.tensor,
    residual_scale: tl.tensor,
    DTYPE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L1: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    tensor = tl.program_id(1)
    lane = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    size = num_values(table, stride, tensor)
    unit = tl.load(lift + tensor)
    positive = tl.zeros([GROUP], tl.float64)
    negative = tl.zeros([GROUP], tl.float64)
    for start in range(0, size, _LANES * _AHEAD):
        for row in tl.static_range(_AHEAD):
            index = start + row * _LANES + lane
            known = index < size
            v = load_sum(table, stride, tensor, index, known, residual_scale, DTYPE, RESIDUAL).to(tl.float64) * unit
            if L1:
                positive += tl.where(v > 0, v, 0.0)
                negative += tl.where(v < 0, v, 0.0)
            else:
                positive += v * v
    tl.store(sums + tensor * _LANES + lane, positive)
    tl.store(sums + (tl.num_programs(1) + tensor) * _LANES + lane, negative)


@triton.jit
def _pack(
    scales: tl.tensor,
    allowed: tl.tensor,
    bits: tl.tensor,
    table: tl.tensor,
    stride: tl.tensor,
    residual_scale: tl.tensor,
    DTYPE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PER_BYTE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    tensor, byte = find_block(table, stride, BLOCK)
    index, known = find_values(table, stride, tensor, byte, PER_BYTE, WIDTH, False)
    v = load_sum(table, stride, tensor, index, known, residual_scale, DTYPE, RESIDUAL)
    positive = v >= 0
    if RESIDUAL:
        high = tl.load(scales + tensor)
        unsent = v - tl.where(positive, high, 0.0 - high)
        store_residual(table, stride, tensor, index, known, allowed, unsent, DTYPE)
    flag = (positive & known).to(tl.int32) << (7 - tl.arange(0, WIDTH))[None, :]
    num_bytes, first = byte_span(table, stride, tensor)
    tl.store(bits + first + byte, tl.sum(flag, axis=1).to(tl.uint8), mask=byte < num_bytes)


@triton.jit
def _unpack(
    bits: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = at < size
    byte = tl.load(bits + (at >> 3), mask=known, other=0).to(tl.int32)
    positive = (byte >> (7 - (at & 7)).to(tl.int32)) & 1
    value = tl.where(positive != 0, tl.load(high), tl.load(low))
    if ACCUMULATE:
        value = tl.load(out + at, mask=known, other=0.0) + value
    tl.store(out + at, value, mask=known)
