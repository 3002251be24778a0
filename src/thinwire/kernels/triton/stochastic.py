"""Random trits of a batch, packed in the same pass: `terngrad` (TernGrad, equations 1–3).

    t = sign(v) with probability min(|v|, limit) / scale, else 0

The random number of value i under a key is the CPU's (`kernels.numba.stochastic`): a 32-bit counter through two
published mixers, here the same lines once more. So the trits are the CPU's, whatever the block a value falls in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
import torch
import triton
import triton.language as tl

from thinwire.errors import FrameError
from thinwire.kernels.contract import DIGITS_PER_CODE, UNIT, Key, check_scale
from thinwire.kernels.triton.batch import (
    NUMPY_TYPES,
    Batch,
    Given,
    Pending,
    Tables,
    byte_span,
    find_block,
    load_block,
    store_residual,
)
from thinwire.kernels.triton.dense import Scaled, decode_dense, encode_dense
from thinwire.kernels.triton.moments import moments, root
from thinwire.kernels.triton.ternary import place_value

_LIFT_EXPONENTS = {torch.float32: 64, torch.float64: 512}


def encode_stochastic(
    values: Sequence[torch.Tensor],
    *,
    keys: Sequence[Key],
    packing: str,
    clip: float = 0.0,
    centred: bool = True,
    min_spread: float = 0.0,
    scales: Sequence[float | None] = (),
    **given: Unpack[Given],
) -> Pending:
    """Encodes a batch: limit = min(clip·σ, max|v|), or max|v| without clipping; scale = limit unless given.

    Args:
        keys: of each tensor's random numbers.
        packing: "base243" (five trits a byte) or "2bit" (four).
        clip: c of c·σ; 0 does not clip.
        centred: σ about the mean, or about zero.
        min_spread: where σ is at most this share of the largest magnitude, nothing is clipped.
        scales: of each tensor, at least its limit, else all of the batch is refused; None or (): its limit.

    The other arguments, and what is returned, are those of `thinwire.kernels.triton.ternary.encode_ternary`; limits
    are returned too.
    """

    def rule(batch: Batch, largest: torch.Tensor) -> Scaled:
        limits = largest if clip == 0 else clipped_at(batch, largest, clip, centred=centred, min_spread=min_spread)
        found = _given_scales(batch, limits, scales)
        lifts, steps = _steps(found)
        words = np.array(keys, np.int64)
        arguments = {
            "limits": limits,
            "lifts": lifts,
            "steps": steps,
            "keys": batch.workspace.upload("stochastic.keys", words),
        }
        return Scaled(found, arguments, limits)

    return encode_dense(values, kernel=_pack, rule=rule, per_byte=DIGITS_PER_CODE[packing], **given)


def clipped_at(batch: Batch, largest: torch.Tensor, clip: float, *, centred: bool, min_spread: float) -> torch.Tensor:
    """min(clip·σ, max|v|) of each tensor in its type, by the operations of `terngrad` on the CPU."""
    sums = moments(batch, largest, signed=centred, squares=True)
    size, top = batch.sizes.to(torch.float64), largest.to(torch.float64)
    mean = (sums.positive + sums.negative) / size
    sigma = root((sums.squares / size - mean * mean).clamp(min=0.0)) * sums.unit
    limits = torch.minimum(torch.minimum(sigma * clip, top).to(batch.dtype), largest)
    return torch.where(sigma <= top * min_spread, largest, limits)


def decode_two_bit(
    payloads: Sequence[Any], *, scales: Sequence[float], outs: Sequence[torch.Tensor], **into: Any
) -> None:
    """``out = scale * t``, or ``out += scale * t``, of two-bit trits; does not wait.

    Args:
        payloads: uint8[ceil(n / 4)] for out[n], one for each tensor; the rest as for `decode_dense`.

    Raises:
        FrameError: a pair of bits is 3, which no trit is, or a scale is no finite number >= 0. No tensor was touched.
    """
    received = [np.frombuffer(payload, np.uint8) for payload in payloads]
    for codes, scale, out in zip(received, scales, outs, strict=True):
        check_scale(scale, NUMPY_TYPES[out.dtype])
        if np.any(codes & (codes >> 1) & 0x55):
            raise FrameError("two bits of a trit are both set: the payload is damaged")
    decode_dense(received, per_byte=4, scales=scales, outs=outs, **into)


def _given_scales(batch: Batch, limits: torch.Tensor, scales: Sequence[float | None]) -> torch.Tensor:
    """The limits, but where a scale was given."""
    if all(scale is None for scale in scales):
        return limits
    told = np.array([np.nan if scale is None else scale for scale in scales], np.float64)
    there = batch.workspace.upload("stochastic.scales", told)
    return torch.where(torch.isnan(there), limits, there.to(batch.dtype))


def _steps(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(lift, step): u·scale·lift = (24-bit draw)·step, where the power of two `lift` keeps products normal."""
    wide = scales.to(torch.float64)
    tiny = (wide > 0) & (wide < torch.finfo(scales.dtype).tiny * 2.0**48)
    lifts = torch.ones_like(wide).masked_fill_(tiny, 2.0 ** _LIFT_EXPONENTS[scales.dtype])
    return lifts.to(scales.dtype), (wide * lifts * UNIT).to(scales.dtype)


@triton.jit
def draw(counter: tl.tensor, key0: tl.tensor, key1: tl.tensor) -> tl.tensor:
    """The 24 high bits of one draw, int32. `numba.stochastic.draw` has the same lines."""
    x = (counter + key0).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16) ^ key1.to(tl.uint32)
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = (x ^ (x >> 11)) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    x = x ^ (x >> 14)
    return (x >> 8).to(tl.int32)


@triton.jit
def _pack(
    scales: tl.tensor,
    allowed: tl.tensor,
    payload: tl.tensor,
    limits: tl.tensor,
    lifts: tl.tensor,
    steps: tl.tensor,
    keys: tl.tensor,
    batch: Tables,
) -> None:
    tensor, byte = find_block(batch)
    index, known, v = load_block(batch, tensor, byte)
    limit = tl.load(limits + tensor)
    clipped = tl.minimum(tl.maximum(v, -limit), limit) * tl.load(lifts + tensor)
    random = draw(index, tl.load(keys + 2 * tensor), tl.load(keys + 2 * tensor + 1))
    u = random.to(batch.DTYPE) * tl.load(steps + tensor)
    above, below = clipped > u, clipped < -u
    if batch.RESIDUAL:
        m = tl.load(scales + tensor)
        unsent = v - tl.where(above, m, tl.where(below, -m, 0.0))
        store_residual(batch, tensor, 0, index, known, allowed, unsent)
    # Where there is no value v is 0, and so is its trit: the padding.
    digit = tl.where(above, 2, tl.where(below, 0, 1))
    place = tl.arange(0, batch.WIDTH)
    weight = 1 << (2 * place) if batch.PER_BYTE == 4 else tl.where(place < batch.PER_BYTE, place_value(place), 0)
    code = tl.sum(digit * weight[None, :], axis=1)
    num_bytes, first = byte_span(batch, tensor)
    tl.store(payload + first + byte, code.to(tl.uint8), mask=byte < num_bytes)
