"""Whole numbers in a fixed number of bits each, decoded: `votes`, the downlink of TernGrad.

Value i takes bits i·width … (i + 1)·width − 1 of the payload, the lowest first, as `kernels.numba.integers` packs them.
A program reads the four bytes in which each of its values lies: they are in the cache, and what counts is the output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from thinwire.kernels.triton.dense import DECODE_BLOCK, put
from thinwire.kernels.triton.workspace import DeviceWorkspace

MAX_WIDTH = 25
"""Bits of a value; with the up to seven bits in front of it, it lies in four bytes."""


def decode_integers(
    payload: Any,
    *,
    width: int,
    top: int,
    scale: float,
    out: torch.Tensor,
    accumulate: bool = False,
    workspace: DeviceWorkspace,
) -> None:
    """``out = scale · (number − top) / top``, computed in float64, or ``out +=``; does not wait.

    Args:
        payload: uint8[ceil(n·width / 8)], of numbers 0 … 2·top that the caller has checked.
        width: bits a number, 1 … 25.
        top: 1 … 2**24.
        scale: finite in the type of `out`.
        out: flat, float32[n] or float64[n].
        workspace: of out's device; its next use must `synchronize` first.
    """
    received = np.frombuffer(payload, np.uint8)
    with workspace.decoding():
        _unpack[(-(-out.numel() // DECODE_BLOCK),)](
            workspace.upload("integers.received", received),
            received.size,
            width,
            workspace.upload("integers.worth", np.array([scale, top], np.float64)),
            out,
            out.numel(),
            ACCUMULATE=accumulate,
            BLOCK=DECODE_BLOCK,
            enable_fp_fusion=False,
        )


@triton.jit(do_not_specialize=["num_bytes", "width", "size"])
def _unpack(
    packed: tl.tensor,
    num_bytes: tl.tensor,
    width: tl.tensor,
    worth: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = at < size
    bit = at * width
    held = tl.zeros([BLOCK], tl.uint32)
    for place in tl.static_range(4):
        byte = (bit >> 3) + place
        part = tl.load(packed + byte, mask=known & (byte < num_bytes), other=0)
        held |= part.to(tl.uint32) << (8 * place)
    number = (held >> (bit & 7).to(tl.uint32)).to(tl.int64) & ((tl.full([1], 1, tl.int64) << width) - 1)
    scale, top = tl.load(worth), tl.load(worth + 1)
    value = scale * ((number.to(tl.float64) - top) / top)
    put(out, at, value.to(out.dtype.element_ty), known, ACCUMULATE)
