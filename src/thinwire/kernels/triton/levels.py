"""`int8` of a batch: q = round(v / scale), half to even, within ±127 (3LC §4.2, "8-bit int").

The scale is found on the device by the same operations in the same type as on the CPU, with divisions that round
to nearest: neither Triton's plain float32 division nor torch's division by a number does that on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
import torch
import triton
import triton.language as tl

from thinwire.kernels.triton.batch import Batch, Tables, byte_span, find_block, load_block, store_residual
from thinwire.kernels.triton.dense import Given, Scaled, decode_dense, encode_dense, put
from thinwire.kernels.triton.pending import Pending
from thinwire.kernels.triton.workspace import DeviceWorkspace

_TOP = tl.constexpr(127)


def encode_int8(values: Sequence[torch.Tensor], *, largest_scale: float, **given: Unpack[Given]) -> Pending:
    """Encodes a batch: scale = max|v| / 127, at most `largest_scale`; one level per byte.

    Args and returns as `thinwire.kernels.triton.ternary.encode_ternary`.
    """

    def rule(batch: Batch, largest: torch.Tensor) -> Scaled:
        scales = torch.clamp(largest / torch.full_like(largest, 127), max=largest_scale)
        return Scaled(scales, {"ROUNDS": 1.5 * 2**52 if batch.dtype == torch.float64 else 1.5 * 2**23})

    return encode_dense(values, kernel=_round, rule=rule, per_byte=1, **given)


def decode_int8(
    payload: Any, *, scale: float, out: torch.Tensor, accumulate: bool = False, workspace: DeviceWorkspace
) -> None:
    """``out = scale * levels``, or ``out += scale * levels``; does not wait. The caller has checked the levels."""
    levels = np.frombuffer(payload, np.int8)
    decode_dense(_scale, levels, scale=scale, out=out, accumulate=accumulate, workspace=workspace)


@triton.jit
def _round(scales: tl.tensor, allowed: tl.tensor, payload: tl.tensor, batch: Tables, ROUNDS: tl.constexpr) -> None:
    tensor, byte = find_block(batch)
    index, known, v = load_block(batch, tensor, byte, False)
    scale = tl.load(scales + tensor)
    divisor = tl.where(scale > 0, scale, 1.0)  # all levels of a zero scale are zero: so are all values
    q = tl.div_rn(v, divisor) if tl.float32 == batch.DTYPE else v / divisor
    q = tl.minimum(tl.maximum(q, -_TOP), _TOP)
    # 1.5 times the number from which floats are whole: adding and taking it away rounds half to even.
    q = (q + ROUNDS) - ROUNDS
    if batch.RESIDUAL:
        store_residual(batch, tensor, index, known, allowed, v - q * scale)
    _, first = byte_span(batch, tensor)
    tl.store(payload + first + index, q.to(tl.int8).to(tl.uint8, bitcast=True), mask=known)


@triton.jit
def _scale(
    payload: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = at < size
    m = tl.load(scale)
    put(out, at, tl.load(payload + at, mask=known, other=0).to(m.dtype) * m, known, ACCUMULATE)
