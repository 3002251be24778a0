"""Codecs that make the same number of bytes of any values, with at most one scale: `bf16`, `int8`, `onebit` of a batch.

Each codec has a rule for its scale and a kernel that makes bytes; `encode_dense` does the rest for all of them: the
batch, its largest magnitudes, refused tensors, the payload's memory. One kernel decodes.

`bf16` is the upper half of a float32, rounded half to even. The arithmetic is on the bits, so that rounding of ties
does not depend on the device's conversion; float64 values are rounded to float32 first.

`int8` is q = round(v / scale), half to even, within ±127 (3LC §4.2, "8-bit int"); `onebit` is the sign of every value,
and one scale from sums over the tensor (DoubleSqueeze §5.1). The device computes scales by the same operations in the
same type as the CPU, with divisions that round to nearest: neither Triton's plain float32 division nor torch's
division by a number does that on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import torch
import triton
import triton.language as tl

from thinwire.kernels.triton.batch import (
    Batch,
    Given,
    Pending,
    Tables,
    byte_span,
    decoding,
    encoding,
    factor_of,
    find_block,
    find_start,
    load_block,
    may_change,
    num_values,
    store_residual,
    values_of,
)
from thinwire.kernels.triton.moments import moments, root
from thinwire.kernels.triton.workspace import DeviceWorkspace

DECODE_BLOCK = 4096  # values per program, in decoding
_TOP = tl.constexpr(127)


def encode_dense(
    values: Sequence[torch.Tensor],
    *,
    kernel: Any,
    rule: Callable[[Batch, torch.Tensor], torch.Tensor],
    per_byte: int,
    kind: torch.dtype = torch.uint8,
    **given: Unpack[Given],
) -> Pending:
    """Encodes a batch: magnitudes, scales, and one pass that makes the bytes and updates the residuals.

    Args:
        values: as in `thinwire.kernels.triton.ternary.encode_ternary`; so are the arguments `given`.
        kernel: takes `scales`, `allowed`, `payload` and the batch's arguments.
        rule: computes the scales from the batch and its largest magnitudes, on the device.
        per_byte: values per element of the payload.
        kind: dtype of the payload's elements.
    """
    with encoding(values, per_byte=per_byte, **given) as batch:
        largest = batch.largest()
        scales = rule(batch, largest)
        payload = batch.workspace.array("dense.payload", batch.num_bytes, kind)
        kernel[(batch.num_blocks,)](
            scales=scales,
            allowed=may_change(largest, scales, together=given.get("together", False)),
            payload=payload,
            **batch.launch,
        )
        return Pending(batch, largest=largest, scales=scales, payload=payload)


def decode_dense(
    payloads: Sequence[Any],
    *,
    per_byte: int,
    kind: type[np.int8 | np.uint8 | np.int16],
    scales: Sequence[float],
    outs: Sequence[torch.Tensor],
    accumulate: bool = False,
    workspace: DeviceWorkspace,
) -> None:
    """``out = scale * q``, or ``out += scale * q``, of payloads that the caller has checked; does not wait.

    Args:
        payloads: any buffers of bytes, one for each tensor.
        per_byte: number of q in a byte: 1 for levels, 8 for bits, which decode to 1 and -1.
        kind: dtype of the numbers in a payload: signed levels, bytes of bits, or the upper halves of float32.
        scales: finite in the type of the tensors; halves have none.
        outs: float32[n] or float64[n] each, of one type, contiguous, n > 0.
        workspace: of their device; its next use must `synchronize` first.
    """
    received = [np.frombuffer(payload, kind) for payload in payloads]
    with decoding(outs, scales, per_byte=per_byte, tile=DECODE_BLOCK, workspace=workspace) as batch:
        _decode[(batch.num_blocks,)](
            workspace.upload_all("dense.received", received),
            batch.tables,
            ACCUMULATE=accumulate,
            enable_fp_fusion=False,
        )


def encode_bfloat(values: Sequence[torch.Tensor], *, most: float, **given: Unpack[Given]) -> Pending:
    """Encodes a batch: two bytes a value, little-endian; a tensor with a float32 above `most` is refused.

    Args and returns as `thinwire.kernels.triton.ternary.encode_ternary`.
    """

    def rule(batch: Batch, largest: torch.Tensor) -> torch.Tensor:
        # bf16 has no scale. An infinite one refuses a tensor whose largest value is finite but rounds to Inf.
        return torch.where(largest.to(torch.float32) <= most, 0.0, torch.inf)

    return encode_dense(values, kernel=_narrow, rule=rule, per_byte=1, kind=torch.int16, **given)


def encode_int8(values: Sequence[torch.Tensor], *, largest_scale: float, **given: Unpack[Given]) -> Pending:
    """Encodes a batch: scale = max|v| / 127, at most `largest_scale`; one level per byte.

    Args and returns as `thinwire.kernels.triton.ternary.encode_ternary`.
    """

    def rule(batch: Batch, largest: torch.Tensor) -> torch.Tensor:
        return torch.clamp(largest / torch.full_like(largest, 127), max=largest_scale)

    return encode_dense(values, kernel=_round, rule=rule, per_byte=1, **given)


def encode_signs(values: Sequence[torch.Tensor], *, norm: Literal["l2", "l1"], **given: Unpack[Given]) -> Pending:
    """Encodes a batch: a bit is set where v >= 0, and decodes to ±scale, scale = ‖v‖₂ / √n or ‖v‖₁ / n.

    Args and returns as `thinwire.kernels.triton.ternary.encode_ternary`.
    """

    def rule(batch: Batch, largest: torch.Tensor) -> torch.Tensor:
        sums = moments(batch, largest, signed=norm == "l1", squares=norm == "l2")
        mean = (sums.positive - sums.negative if norm == "l1" else sums.squares) / batch.sizes.to(torch.float64)
        scale = (mean if norm == "l1" else root(mean)) * sums.unit
        # Rounding must not raise the scale above the largest magnitude.
        return torch.minimum(scale.to(batch.dtype), largest)

    return encode_dense(values, kernel=_pack_signs, rule=rule, per_byte=8, **given)


@triton.jit
def _narrow(scales: tl.tensor, allowed: tl.tensor, payload: tl.tensor, batch: Tables) -> None:
    tensor, byte = find_block(batch)
    index, known, v = load_block(batch, tensor, byte)
    bits = v.to(tl.float32).to(tl.int32, bitcast=True)
    half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    if batch.RESIDUAL:
        store_residual(batch, tensor, 0, index, known, allowed, v - widened(half).to(batch.DTYPE))
    _, first = byte_span(batch, tensor)
    tl.store(payload + first + index, half.to(tl.int16), mask=known)


@triton.jit
def widened(half: tl.tensor) -> tl.tensor:
    """Returns the float32 with this upper half."""
    return (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _round(scales: tl.tensor, allowed: tl.tensor, payload: tl.tensor, batch: Tables) -> None:
    ROUNDS: tl.constexpr = 6755399441055744.0 if tl.float64 == batch.DTYPE else 12582912.0  # 1.5 · 2**52, 1.5 · 2**23
    tensor, byte = find_block(batch)
    index, known, v = load_block(batch, tensor, byte)
    scale = tl.load(scales + tensor)
    divisor = tl.where(scale > 0, scale, 1.0)  # with scale 0 all values are 0, so all levels are 0
    q = tl.div_rn(v, divisor) if tl.float32 == batch.DTYPE else v / divisor
    q = tl.minimum(tl.maximum(q, -_TOP), _TOP)
    # 1.5 times the number above which all floats are whole: adding and subtracting it rounds half to even.
    q = (q + ROUNDS) - ROUNDS
    if batch.RESIDUAL:
        store_residual(batch, tensor, 0, index, known, allowed, v - q * scale)
    _, first = byte_span(batch, tensor)
    tl.store(payload + first + index, q.to(tl.int8).to(tl.uint8, bitcast=True), mask=known)


@triton.jit
def _pack_signs(scales: tl.tensor, allowed: tl.tensor, payload: tl.tensor, batch: Tables) -> None:
    tensor, byte = find_block(batch)
    index, known, v = load_block(batch, tensor, byte)
    positive = v >= 0
    if batch.RESIDUAL:
        high = tl.load(scales + tensor)
        store_residual(batch, tensor, 0, index, known, allowed, v - tl.where(positive, high, 0.0 - high))
    flag = (positive & known).to(tl.int32) << (7 - tl.arange(0, batch.WIDTH))[None, :]
    num_bytes, first = byte_span(batch, tensor)
    tl.store(payload + first + byte, tl.sum(flag, axis=1).to(tl.uint8), mask=byte < num_bytes)


@triton.jit
def _decode(payload: tl.tensor, batch: Tables, ACCUMULATE: tl.constexpr) -> None:
    tensor, start = find_start(batch)
    _, first = byte_span(batch, tensor)
    TILE: tl.constexpr = batch.BLOCK * batch.PER_BYTE
    before = start * batch.PER_BYTE
    out, left = values_of(batch, tensor) + before, num_values(batch, tensor) - before
    payload += first + start
    if left >= TILE:  # without a mask, neighbours are one access
        decode_tile(payload, batch, tensor, out, TILE, TILE, ACCUMULATE, True)
    else:
        decode_tile(payload, batch, tensor, out, left.to(tl.int32), TILE, ACCUMULATE, False)


@triton.jit
def decode_tile(
    payload: tl.tensor,
    batch: Tables,
    tensor: tl.tensor,
    out: tl.tensor,
    left: tl.tensor,
    TILE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Writes the decoded values of the block's bytes; WHOLE: the block is full."""
    m = factor_of(batch, tensor)
    at = tl.arange(0, TILE)
    known = None if WHOLE else at < left
    byte = tl.load(payload + at // batch.PER_BYTE, mask=known, other=None if WHOLE else 0)
    if byte.dtype == tl.int16:
        put(out, at, widened(byte).to(batch.DTYPE), known, ACCUMULATE)
    elif batch.PER_BYTE == 1:
        put(out, at, byte.to(batch.DTYPE) * m, known, ACCUMULATE)
    else:
        positive = (byte.to(tl.int32) >> (7 - (at & 7))) & 1
        put(out, at, tl.where(positive != 0, m, 0.0 - m), known, ACCUMULATE)


@triton.jit
def put(out: tl.tensor, at: tl.tensor, value: tl.tensor, known: tl.tensor, ACCUMULATE: tl.constexpr) -> None:
    """``out = value``, or ``out += value``, where `known`; everywhere if `known` is None."""
    if ACCUMULATE:
        value = tl.load(out + at, mask=known) + value
    tl.store(out + at, value, mask=known)


@triton.jit
def put_digit(
    out: tl.tensor, at: tl.tensor, digit: tl.tensor, m: tl.tensor, known: tl.tensor, ACCUMULATE: tl.constexpr
) -> None:
    """``out = m·(digit − 1)``, or ``out +=``, which changes no bit where the digit is 1."""
    value = tl.where(digit == 2, m, tl.where(digit == 0, -m, 0.0))
    if ACCUMULATE:
        held = tl.load(out + at, mask=known)
        value = tl.where(digit == 1, held, held + value)
    tl.store(out + at, value, mask=known)
