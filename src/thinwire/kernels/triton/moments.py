"""Sums over each tensor of a batch, in float64 and in the CPU's order (see `thinwire.kernels.numba.moments`).

Float sums depend on their order, and scales on the wire are made of such sums. A tensor is cut into stretches; each has
1,024 running sums (value i goes to sum i mod 1,024), which are folded in halves; the stretches' totals are added in the
same way. A program works on one stretch and loads eight rows ahead.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from thinwire.kernels.numba.moments import LANES, STRETCH
from thinwire.kernels.triton.batch import Batch, Tables, load_sum, num_values

_LANES, _STRETCH = tl.constexpr(LANES), tl.constexpr(STRETCH)
_FOLDS = tl.constexpr(LANES.bit_length() - 1)
_AHEAD = tl.constexpr(8)  # rows
_WARPS = 8


class Moments(NamedTuple):
    """float64[num_tensors] each; the sums in units of `unit` (its square, for squares). Sums not requested are 0."""

    positive: torch.Tensor
    negative: torch.Tensor
    squares: torch.Tensor
    unit: torch.Tensor


def moments(batch: Batch, largest: torch.Tensor, *, signed: bool = False, squares: bool = False) -> Moments:
    """Adds v of each tensor of a batch: the positive and the negative values (`signed`), the `squares`.

    Args:
        batch: with residuals or without; made inside `workspace.running()`, like this call.
        largest: its largest magnitudes.
    """
    unit, workspace, size = _units(largest), batch.workspace, batch.num_tensors
    # For every tensor the index of its first stretch in the batch; then for every stretch its tensor.
    counts = -(-batch.numels // STRETCH)
    ends = np.cumsum(counts)
    table = workspace.upload("moments.table", np.concatenate([[0], ends, np.repeat(np.arange(size), counts)]))
    num_stretches = int(ends[-1])
    sums = workspace.array("moments.sums", 3 * num_stretches, torch.float64).zero_()
    _sum[(num_stretches,)](
        1.0 / unit,
        table,
        size,
        sums,
        batch.tables,
        SIGNED=signed,
        SQUARES=squares,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    totals = workspace.array("moments.totals", 3 * size, torch.float64).view(3, size)
    _add_up[(size, 3)](sums, table, num_stretches, totals, enable_fp_fusion=False)
    return Moments(totals[0], totals[1], totals[2], unit)


def root(squares: torch.Tensor) -> torch.Tensor:
    """Returns square roots of float64[n], n > 0, rounded to nearest; torch's on the CPU err in one of 150 cases."""
    roots = torch.empty_like(squares)
    _root[(1,)](squares.contiguous(), roots, squares.numel(), BLOCK=1024)
    return roots


def _units(largest: torch.Tensor) -> torch.Tensor:
    """Returns a power of two near each magnitude, so that float64 sums do not overflow; 1 for float32."""
    if largest.dtype == torch.float32:
        return torch.ones_like(largest, dtype=torch.float64)
    exponent = (largest.view(torch.int64) >> 52) - 1022
    return ((exponent.clamp(-1000, 1000) + 1023) << 52).view(torch.float64)


@triton.jit
def fold(lanes: tl.tensor) -> tl.tensor:
    """Returns the sum of float64[1024], folded in halves: [1]."""
    for turn in tl.static_range(_FOLDS):
        lanes = tl.sum(tl.reshape(lanes, [2, _LANES >> (turn + 1)]), axis=0)
    return lanes


@triton.jit(do_not_specialize=["num_tensors"])
def _sum(
    lift: tl.tensor,
    table: tl.tensor,
    num_tensors: tl.tensor,
    sums: tl.tensor,
    batch: Tables,
    SIGNED: tl.constexpr,
    SQUARES: tl.constexpr,
) -> None:
    stretch = tl.program_id(0)
    tensor = tl.load(table + num_tensors + 1 + stretch)
    first = (stretch - tl.load(table + tensor)) * _STRETCH
    left = tl.minimum(num_values(batch, tensor) - first, _STRETCH).to(tl.int32)
    unit = tl.load(lift + tensor)
    lane = tl.arange(0, _LANES)
    positive = tl.zeros([_LANES], tl.float64)
    negative = tl.zeros([_LANES], tl.float64)
    squares = tl.zeros([_LANES], tl.float64)
    for start in range(0, left, _LANES * _AHEAD):
        for row in tl.static_range(_AHEAD):
            at = start + row * _LANES + lane
            v = load_sum(batch, tensor, first, at, at < left).to(tl.float64) * unit
            if SIGNED:
                positive += tl.where(v > 0, v, 0.0)
                negative += tl.where(v < 0, v, 0.0)
            if SQUARES:
                squares += v * v
    into = sums + stretch + tl.arange(0, 1)
    if SIGNED:
        tl.store(into, fold(positive))
        tl.store(into + tl.num_programs(0), fold(negative))
    if SQUARES:
        tl.store(into + 2 * tl.num_programs(0), fold(squares))


@triton.jit(do_not_specialize=["num_stretches"])
def _add_up(sums: tl.tensor, table: tl.tensor, num_stretches: tl.tensor, totals: tl.tensor) -> None:
    """Adds one kind of a tensor's sums, in one program."""
    tensor, kind = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(table + tensor), tl.load(table + tensor + 1)
    lanes = tl.zeros([_LANES], tl.float64)
    for start in range(begin, end, _LANES):
        at = start + tl.arange(0, _LANES)
        lanes += tl.load(sums + kind * num_stretches + at, mask=at < end, other=0.0)
    tl.store(totals + kind * tl.num_programs(0) + tensor + tl.arange(0, 1), fold(lanes))


@triton.jit(do_not_specialize=["size"])
def _root(squares: tl.tensor, roots: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(roots + at, tl.sqrt(tl.load(squares + at, mask=at < size, other=0.0)), mask=at < size)
