"""`onebit` of a batch: the sign of every value, and one scale from sums over the tensor (DoubleSqueeze §5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack

import numpy as np
import torch
import triton
import triton.language as tl

from thinwire.kernels.triton.batch import Batch, Tables, byte_span, find_block, load_block, store_residual
from thinwire.kernels.triton.dense import Given, Scaled, decode_dense, encode_dense, put
from thinwire.kernels.triton.moments import moments, root
from thinwire.kernels.triton.pending import Pending
from thinwire.kernels.triton.workspace import DeviceWorkspace


def encode_signs(values: Sequence[torch.Tensor], *, norm: Literal["l2", "l1"], **given: Unpack[Given]) -> Pending:
    """Encodes a batch: a bit is set where v >= 0, and stands for ±scale, scale = ‖v‖₂ / √n or ‖v‖₁ / n.

    Args and returns as `thinwire.kernels.triton.ternary.encode_ternary`.
    """

    def rule(batch: Batch, largest: torch.Tensor) -> Scaled:
        sums = moments(batch, largest, signed=norm == "l1", squares=norm == "l2")
        mean = (sums.positive - sums.negative if norm == "l1" else sums.squares) / batch.sizes.to(torch.float64)
        scale = (mean if norm == "l1" else root(mean)) * sums.unit
        # Rounding must not lift the scale above the largest magnitude.
        return Scaled(torch.minimum(scale.to(batch.dtype), largest), {})

    return encode_dense(values, kernel=_pack, rule=rule, per_byte=8, **given)


def decode_signs(
    payload: Any, *, scale: float, out: torch.Tensor, accumulate: bool = False, workspace: DeviceWorkspace
) -> None:
    """``out = scale`` where a bit is set, else ``-scale``; or adds them; does not wait."""
    bits = np.frombuffer(payload, np.uint8)
    decode_dense(_unpack, bits, scale=scale, out=out, accumulate=accumulate, workspace=workspace)


@triton.jit
def _pack(scales: tl.tensor, allowed: tl.tensor, payload: tl.tensor, batch: Tables) -> None:
    tensor, byte = find_block(batch)
    index, known, v = load_block(batch, tensor, byte, False)
    positive = v >= 0
    if batch.RESIDUAL:
        high = tl.load(scales + tensor)
        store_residual(batch, tensor, index, known, allowed, v - tl.where(positive, high, 0.0 - high))
    flag = (positive & known).to(tl.int32) << (7 - tl.arange(0, batch.WIDTH))[None, :]
    num_bytes, first = byte_span(batch, tensor)
    tl.store(payload + first + byte, tl.sum(flag, axis=1).to(tl.uint8), mask=byte < num_bytes)


@triton.jit
def _unpack(
    payload: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = at < size
    byte = tl.load(payload + (at >> 3), mask=known, other=0).to(tl.int32)
    positive = (byte >> (7 - (at & 7)).to(tl.int32)) & 1
    high = tl.load(scale)
    value = tl.where(positive != 0, high, 0.0 - high)
    put(out, at, value, known, ACCUMULATE)
