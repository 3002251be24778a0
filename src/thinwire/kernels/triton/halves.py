"""`bf16` of a batch: the upper half of a float32, rounded half to even, and back.

The arithmetic is on the bits, so that no conversion of the device's decides how a
tie is rounded. float64 values are rounded to float32 first, there as here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from thinwire.kernels.triton.batch import (
    Batch,
    Given,
    Pending,
    Tables,
    allow,
    byte_span,
    decoding,
    encoding,
    find_block,
    find_start,
    load_block,
    num_values,
    store_residual,
    values_of,
)
from thinwire.kernels.triton.dense import DECODE_BLOCK, put
from thinwire.kernels.triton.workspace import DeviceWorkspace


def encode_bfloat(values: Sequence[torch.Tensor], *, most: float, **given: Unpack[Given]) -> Pending:
    """Encodes a batch: two bytes a value, little-endian.

    Args:
        values: as in `thinwire.kernels.triton.ternary.encode_ternary`, and so is what is `given`.
        most: the largest float32 that is sent; a tensor with a larger one is refused.

    Returns:
        Payloads; where a tensor is refused, `finite` is False.
    """
    with encoding(values, per_byte=1, **given) as batch:
        largest = batch.largest()
        # There is no scale. What stands for it stops a tensor whose largest value is finite and rounds to Inf.
        scales = torch.where(largest.to(torch.float32) <= most, 0.0, torch.inf)
        payload = batch.workspace.array("halves.payload", batch.num_bytes, torch.int16)
        allowed = allow(largest, scales, together=given.get("together", False))
        _narrow[(batch.num_blocks,)](allowed, payload, **batch.launch)
        return Pending(batch, largest=largest, scales=scales, payload=payload.view(torch.uint8), ends=_ends(batch))


def _ends(batch: Batch) -> torch.Tensor:
    """Where each payload ends, in bytes: the batch counts a value as one."""
    return 2 * batch.sizes.cumsum(0)


def decode_bfloat(
    halves: Sequence[NDArray[np.uint16]],
    *,
    outs: Sequence[torch.Tensor],
    accumulate: bool = False,
    workspace: DeviceWorkspace,
) -> None:
    """``out = v``, or ``out += v``; does not wait.

    Args:
        halves: uint16[n], finite, for each tensor; the caller has checked them.
        outs: float32[n] or float64[n] each, of one type, contiguous, n > 0.
        workspace: of their device; its next use must `synchronize` first.
    """
    with decoding(outs, [1.0] * len(outs), per_byte=1, tile=DECODE_BLOCK, workspace=workspace) as batch:
        _widen[(batch.num_blocks,)](
            workspace.upload_all("halves.received", [each.view(np.int16) for each in halves]),
            batch.tables,
            ACCUMULATE=accumulate,
            enable_fp_fusion=False,
        )


@triton.jit
def _narrow(allowed: tl.tensor, payload: tl.tensor, batch: Tables) -> None:
    tensor, byte = find_block(batch)
    index, known, v = load_block(batch, tensor, byte)
    bits = v.to(tl.float32).to(tl.int32, bitcast=True)
    half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    if batch.RESIDUAL:
        sent = (half << 16).to(tl.float32, bitcast=True).to(batch.DTYPE)
        store_residual(batch, tensor, 0, index, known, allowed, v - sent)
    _, first = byte_span(batch, tensor)
    tl.store(payload + first + index, half.to(tl.int16), mask=known)


@triton.jit
def _widen(halves: tl.tensor, batch: Tables, ACCUMULATE: tl.constexpr) -> None:
    tensor, start = find_start(batch)
    _, first = byte_span(batch, tensor)
    at = tl.arange(0, batch.BLOCK)
    known = at < tl.minimum(num_values(batch, tensor) - start, batch.BLOCK).to(tl.int32)
    half = tl.load(halves + (first + start) + at, mask=known, other=0).to(tl.int32)
    value = (half << 16).to(tl.float32, bitcast=True).to(batch.DTYPE)
    put(values_of(batch, tensor) + start, at, value, known, ACCUMULATE)
