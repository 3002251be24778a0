"""3LC of a batch, payloads to floats: the device undoes zero runs and turns codes into values.

The host checks payloads before anything is written; kernels trust them. All payloads of a batch lie end to end, and so
do their codes: a running sum of the bytes' expanded sizes gives the place of each literal in an array of zero codes,
independently of the tensors' ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from thinwire.kernels.contract import (
    FIRST_RUN,
    ZERO_CODE,
    check_length,
    check_scale,
    num_codes_of,
)
from thinwire.kernels.numba.jit import frozen
from thinwire.kernels.numba.zero_run import num_expanded
from thinwire.kernels.triton.batch import (
    NUMPY_TYPES,
    Arrays,
    Tables,
    byte_span,
    decoding,
    factor_of,
    find_start,
    num_values,
    values_of,
)
from thinwire.kernels.triton.dense import put_digit
from thinwire.kernels.triton.ternary import place_value
from thinwire.kernels.triton.workspace import DeviceWorkspace

TILE = 8192  # places per program; 5 of the 8 places of a code hold values
_RUN = tl.constexpr(FIRST_RUN)
_BLOCK = 1024  # bytes of payload per program


def decode_ternary(
    payloads: Sequence[Any],
    *,
    scales: Sequence[float],
    outs: Sequence[torch.Tensor],
    accumulate: bool = False,
    workspace: DeviceWorkspace,
) -> None:
    """``out = scale * q``, or ``out += scale * q``, as `thinwire.kernels.numba.decode_ternary` does it; does not wait.

    Args:
        payloads: any buffers of bytes, one for each tensor.
        scales: of the tensors.
        outs: float32[n] or float64[n] each, of one type, contiguous, n > 0.
        workspace: of the tensors' device; its next use must `synchronize` first.

    Raises:
        FrameError: a payload does not hold exactly ceil(n / 5) valid codes, or a scale is not a finite number
            >= 0. All tensors are unchanged.
    """
    received = [np.frombuffer(payload, np.uint8) for payload in payloads]
    for codes, scale, out in zip(received, scales, outs, strict=True):
        check_scale(scale, NUMPY_TYPES[out.dtype])
        check_length(num_expanded(frozen(codes)), num_codes_of(out.numel()))
    decode_checked(received, scales=scales, outs=outs, accumulate=accumulate, workspace=workspace)


def decode_checked(
    payloads: Sequence[NDArray[np.uint8]],
    *,
    scales: Sequence[float] | NDArray[np.float64],
    outs: Sequence[torch.Tensor] | Arrays,
    accumulate: bool = False,
    workspace: DeviceWorkspace,
) -> None:
    """As `decode_ternary`, of payloads that the caller has checked, each in any number of pieces."""
    with decoding(outs, scales, per_byte=5, tile=TILE, workspace=workspace) as batch:
        _dequantise[(batch.num_blocks,)](
            _zero_run_decode(payloads, batch.num_bytes, workspace),
            batch.tables,
            ACCUMULATE=accumulate,
            enable_fp_fusion=False,
        )


def _zero_run_decode(payloads: Sequence[NDArray[np.uint8]], num_codes: int, workspace: DeviceWorkspace) -> torch.Tensor:
    """Returns the codes of payloads, uint8[num_codes] in the workspace.

    The caller has checked that they expand to exactly `num_codes` codes: kernels trust them.
    """
    received = workspace.upload_all("zero_run.received", payloads)
    codes = workspace.array("zero_run.codes", num_codes, torch.uint8).fill_(ZERO_CODE)
    num_blocks = -(-received.numel() // _BLOCK)
    counts = workspace.array("zero_run.counts", num_blocks, torch.int64)
    _expand[(num_blocks,)](received, received.numel(), counts, BLOCK=_BLOCK)
    ends = workspace.array("zero_run.ends", num_blocks, torch.int64)
    torch.cumsum(counts, 0, out=ends)
    _place[(num_blocks,)](received, received.numel(), ends, codes, BLOCK=_BLOCK)
    return codes


@triton.jit
def _dequantise(codes: tl.tensor, batch: Tables, ACCUMULATE: tl.constexpr) -> None:
    tensor, start = find_start(batch)
    _, first = byte_span(batch, tensor)
    if 5 * (start + batch.BLOCK) <= num_values(batch, tensor):  # without a mask, neighbours are one access
        decode_rows(codes + first + start, batch, tensor, start, ACCUMULATE, True)
    else:
        decode_rows(codes + first + start, batch, tensor, start, ACCUMULATE, False)


@triton.jit
def decode_rows(
    codes: tl.tensor,
    batch: Tables,
    tensor: tl.tensor,
    start: tl.tensor,
    ACCUMULATE: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Writes the decoded values of the block's codes, BLOCK neighbours at once; WHOLE: the block is full."""
    m, out, size = factor_of(batch, tensor), values_of(batch, tensor), num_values(batch, tensor)
    at = tl.arange(0, batch.BLOCK)
    for row in tl.static_range(5):
        place, code = 4 - (at + row * batch.BLOCK) % 5, (at + row * batch.BLOCK) // 5
        before = 5 * start + row * batch.BLOCK
        known = None if WHOLE else at < tl.minimum(size - before, batch.BLOCK).to(tl.int32)
        byte = tl.load(codes + code, mask=known, other=None if WHOLE else 0).to(tl.int32)
        # byte / 243, rounded up to a 256th, has the base-3 digits behind its point.
        fraction = (1079 * byte + 1024) >> 10
        digit = (((fraction * place_value(place)) & 255) * 3) >> 8
        put_digit(out + before, at, digit, m, known, ACCUMULATE)


@triton.jit
def _expansion(received: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Returns the block's bytes, and the number of codes of each (0 behind the end)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(received + at, mask=at < size, other=0).to(tl.int32)
    return byte, tl.where(at < size, tl.where(byte >= _RUN, byte - (_RUN - 2), 1), 0)


@triton.jit(do_not_specialize=["size"])
def _expand(received: tl.tensor, size: tl.tensor, counts: tl.tensor, BLOCK: tl.constexpr) -> None:
    _, count = _expansion(received, size, BLOCK)
    tl.store(counts + tl.program_id(0), tl.sum(count, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["size"])
def _place(received: tl.tensor, size: tl.tensor, ends: tl.tensor, codes: tl.tensor, BLOCK: tl.constexpr) -> None:
    byte, count = _expansion(received, size, BLOCK)
    program = tl.program_id(0)
    start = tl.load(ends + program - 1, mask=program > 0, other=0)
    at = start + tl.cumsum(count, axis=0) - count
    tl.store(codes + at, byte.to(tl.uint8), mask=(count == 1) & (byte < _RUN))
