"""Zero-run encoding (3LC, section 3.3) in blocks: canonical runs, whatever the number of blocks.

A run of zero codes does not care where blocks end. All that a block must know of those before it is how many codes
the run that reaches into it has, modulo 14: its quantiser noted the last code of the block that is no zero, and a
running maximum over the blocks says where the run began. From there every zero knows its position in its run, hence
whether a byte is written there and which; a running sum of the bytes written says where.
So the join over block borders is exact and the bytes are those of the serial encoder.

Decoding: a running sum of what bytes expand to says where each literal goes, over a ground of zero codes.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from thinwire.kernels.contract import FIRST_RUN, LONGEST_RUN, ZERO_CODE
from thinwire.kernels.triton.batch import Batch, Tables, byte_span, find_block
from thinwire.kernels.triton.workspace import DeviceWorkspace

_ZERO, _RUN, _LONGEST = tl.constexpr(ZERO_CODE), tl.constexpr(FIRST_RUN), tl.constexpr(LONGEST_RUN)
_BLOCK = 1024  # payload bytes per program, in decoding


def zero_run_encode(batch: Batch, codes: torch.Tensor, last_nonzero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces runs of zero codes, each tensor's for itself.

    Args:
        batch: the codes' tensors, PER_BYTE = 5.
        codes: uint8[batch.num_bytes], the codes of all tensors one behind the other.
        last_nonzero: int64[batch.num_blocks], where in `codes` the block's last code other than 121 is, or -1.

    Returns:
        The payloads, one behind the other, and int64[num_tensors] where each ends; views into the workspace.
    """
    workspace, num_blocks = batch.workspace, batch.num_blocks
    running = workspace.array("zero_run.last", num_blocks, torch.int64)
    where = workspace.array("zero_run.where", num_blocks, torch.int64)
    torch.cummax(last_nonzero, 0, out=(running, where))
    counts = workspace.array("zero_run.counts", num_blocks, torch.int64)
    _count[(num_blocks,)](codes, running, counts, batch.tables, num_warps=4)
    ends = workspace.array("zero_run.ends", num_blocks, torch.int64)
    torch.cumsum(counts, 0, out=ends)
    payload = workspace.array("zero_run.payload", batch.num_bytes, torch.uint8)
    _write[(num_blocks,)](codes, running, ends, payload, batch.tables, num_warps=4)
    return payload, ends[batch.last_blocks]


def zero_run_decode(payload: NDArray[np.uint8], num_codes: int, workspace: DeviceWorkspace) -> torch.Tensor:
    """The codes that a payload stands for, uint8[num_codes] in the workspace.

    The caller has checked that the payload expands to exactly `num_codes` codes: kernels trust it.
    """
    received = workspace.upload("zero_run.received", payload)
    codes = workspace.array("zero_run.codes", num_codes, torch.uint8).fill_(ZERO_CODE)
    num_blocks = -(-payload.size // _BLOCK)
    counts = workspace.array("zero_run.counts", num_blocks, torch.int64)
    _expand[(num_blocks,)](received, payload.size, counts, BLOCK=_BLOCK)
    ends = workspace.array("zero_run.ends", num_blocks, torch.int64)
    torch.cumsum(counts, 0, out=ends)
    _place[(num_blocks,)](received, payload.size, ends, codes, BLOCK=_BLOCK)
    return codes


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


@triton.jit
def _bytes_to_write(codes: tl.tensor, running: tl.tensor, batch: Tables) -> tl.tensor:
    """Of each code of the block: whether a byte is written there, and which."""
    tensor, code = find_block(batch)
    num_codes, first = byte_span(batch, tensor)
    inside = code < num_codes
    byte = tl.load(codes + first + code, mask=inside, other=0).to(tl.int32)
    following = tl.load(codes + first + code + 1, mask=code + 1 < num_codes, other=0).to(tl.int32)
    zero = inside & (byte == _ZERO)
    program = tl.program_id(0)
    before = tl.load(running + program - 1, mask=program > 0, other=-1)
    start = first + tl.min(code)
    # Zeros that reach into this block: those behind the last other code, or behind the tensor's beginning.
    carried = ((start - 1 - tl.maximum(before, first - 1)) % _LONGEST).to(tl.int32)
    at = tl.arange(0, batch.BLOCK)
    last = tl.associative_scan(tl.where(zero, -1 - carried, at), 0, _larger)
    rest = (at - last) % _LONGEST
    written = inside & ((byte != _ZERO) | (rest == 0) | (following != _ZERO))
    run = tl.where(rest == 0, 255, tl.where(rest == 1, _ZERO, _RUN - 2 + rest))
    return written.to(tl.int32), tl.where(zero, run, byte).to(tl.uint8)


@triton.jit
def _count(codes: tl.tensor, running: tl.tensor, counts: tl.tensor, batch: Tables) -> None:
    written, _ = _bytes_to_write(codes, running, batch)
    tl.store(counts + tl.program_id(0), tl.sum(written, axis=0).to(tl.int64))


@triton.jit
def _write(codes: tl.tensor, running: tl.tensor, ends: tl.tensor, payload: tl.tensor, batch: Tables) -> None:
    written, value = _bytes_to_write(codes, running, batch)
    program = tl.program_id(0)
    start = tl.load(ends + program - 1, mask=program > 0, other=0)
    tl.store(payload + start + tl.cumsum(written, axis=0) - 1, value, mask=written != 0)


@triton.jit
def _expansion(received: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The block's bytes, and how many codes each of them stands for (0 behind the end)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(received + at, mask=at < size, other=0).to(tl.int32)
    return byte, tl.where(at < size, tl.where(byte >= _RUN, byte - (_RUN - 2), 1), 0)


@triton.jit
def _expand(received: tl.tensor, size: tl.tensor, counts: tl.tensor, BLOCK: tl.constexpr) -> None:
    _, count = _expansion(received, size, BLOCK)
    tl.store(counts + tl.program_id(0), tl.sum(count, axis=0).to(tl.int64))


@triton.jit
def _place(received: tl.tensor, size: tl.tensor, ends: tl.tensor, codes: tl.tensor, BLOCK: tl.constexpr) -> None:
    byte, count = _expansion(received, size, BLOCK)
    program = tl.program_id(0)
    start = tl.load(ends + program - 1, mask=program > 0, other=0)
    at = start + tl.cumsum(count, axis=0) - count
    tl.store(codes + at, byte.to(tl.uint8), mask=(count == 1) & (byte < _RUN))
