"""Sums over each tensor of a batch, in float64 and in the CPU's order (see `thinwire.kernels.numba.moments`).

Sums of floats depend on their order, and scales that travel are made of them: 1,024 running sums stand side by side,
value i goes to sum i mod 1,024, and they are folded in halves. A program keeps 32 of the sums, so that 32 programs
share a tensor; each adds row after row and loads eight rows ahead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from thinwire.kernels.triton.batch import Batch, Tables, load_sum, num_values

_LANES = tl.constexpr(1024)
_GROUP = 32  # sums per program
_AHEAD = tl.constexpr(8)  # rows


class Moments(NamedTuple):
    """float64[num_tensors] each; the sums in units of `unit` (its square, for squares). Sums not asked for are 0."""

    positive: torch.Tensor
    negative: torch.Tensor
    squares: torch.Tensor
    unit: torch.Tensor


def moments(batch: Batch, largest: torch.Tensor, *, signed: bool = False, squares: bool = False) -> Moments:
    """Adds up v of each tensor of a batch: the positive and the negative values (`signed`), the `squares`.

    Args:
        batch: with residuals or without; made inside `workspace.running()`, where this belongs too.
        largest: its largest magnitudes.
    """
    unit = _units(largest)
    sums = batch.workspace.array("moments.sums", 3 * batch.num_tensors * _LANES.value, torch.float64)
    _sum[(_LANES.value // _GROUP, batch.num_tensors)](
        1.0 / unit,
        sums,
        batch.tables,
        SIGNED=signed,
        SQUARES=squares,
        GROUP=_GROUP,
        num_warps=1,
        enable_fp_fusion=False,
    )
    folded = sums.view(3, batch.num_tensors, _LANES.value)
    while folded.shape[2] > 1:
        half = folded.shape[2] // 2
        folded = folded[..., :half] + folded[..., half:]
    return Moments(folded[0, :, 0], folded[1, :, 0], folded[2, :, 0], unit)


def root(squares: torch.Tensor) -> torch.Tensor:
    """Square roots of float64[n], n > 0, rounded to nearest: torch's on the CPU are not, in one of 150 cases."""
    roots = torch.empty_like(squares)
    _root[(1,)](squares.contiguous(), roots, squares.numel(), BLOCK=1024)
    return roots


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
    batch: Tables,
    SIGNED: tl.constexpr,
    SQUARES: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    tensor = tl.program_id(1)
    lane = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    size = num_values(batch, tensor)
    unit = tl.load(lift + tensor)
    positive = tl.zeros([GROUP], tl.float64)
    negative = tl.zeros([GROUP], tl.float64)
    squares = tl.zeros([GROUP], tl.float64)
    for start in range(0, size, _LANES * _AHEAD):
        for row in tl.static_range(_AHEAD):
            index = start + row * _LANES + lane
            known = index < size
            v = load_sum(batch, tensor, index, known).to(tl.float64) * unit
            if SIGNED:
                positive += tl.where(v > 0, v, 0.0)
                negative += tl.where(v < 0, v, 0.0)
            if SQUARES:
                squares += v * v
    row_of = tl.num_programs(1) * _LANES
    tl.store(sums + tensor * _LANES + lane, positive)
    tl.store(sums + row_of + tensor * _LANES + lane, negative)
    tl.store(sums + 2 * row_of + tensor * _LANES + lane, squares)


@triton.jit(do_not_specialize=["size"])
def _root(squares: tl.tensor, roots: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(roots + at, tl.sqrt(tl.load(squares + at, mask=at < size, other=0.0)), mask=at < size)
