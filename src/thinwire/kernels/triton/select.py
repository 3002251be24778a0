"""Values of large magnitude, with their places, and the residual without them: `topk` of a batch.

A value is sent where its magnitude is above a bound, or equals it and is among the first `quota` values that do. Two
steps with the host between them, because only the counts say how long a payload is and in which form its positions
are shorter: the first finds bounds and counts; the second, when frames are asked for, reads the data once more,
writes positions and values where they belong, and clears the residual. So values and residuals must stay as they are
until then. `scatter` decodes: values to their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from thinwire.kernels.triton.batch import (
    Given,
    Tables,
    allow,
    byte_span,
    encoding,
    find_block,
    load_block,
    magnitude_bits,
    store_residual,
)
from thinwire.kernels.triton.dense import put
from thinwire.kernels.triton.order import kth_largest
from thinwire.kernels.triton.workspace import DeviceWorkspace

_ALIGN = 8  # bytes: places and values of every tensor begin at whole words
_BLOCK = 1024  # values per program, in decoding


class Chosen(NamedTuple):
    """What one tensor was encoded to; the arrays are views into pinned memory, valid until the workspace's next use.

    Attributes:
        largest: the largest magnitude.
        num_sent: how many values are sent.
        bitmap: whether `places` is a bitmap, uint8[ceil(n / 8)]; else indices of `width` bits, one behind the other.
        places: uint8, where the values belong.
        body: uint8, the values.
    """

    largest: float
    num_sent: int
    bitmap: bool
    places: NDArray[np.uint8]
    body: NDArray[np.uint8]


class Form(NamedTuple):
    """How the positions of a tensor travel: as a bitmap, or as indices of `width` bits."""

    bitmap: bool
    width: int


class Selected:
    """A batch whose bounds and counts are on their way; `finish` makes the payloads.

    The k largest magnitudes of each tensor are sent; of equal ones those that come first; zeros never.

    Args:
        ks: 1 … n for each tensor.
        form: says for (values, values sent) how positions travel.

    The other arguments are those of `thinwire.kernels.triton.ternary.encode_ternary`.
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        *,
        ks: Sequence[int],
        form: Callable[[int, int], Form],
        **given: Unpack[Given],
    ) -> None:
        self._form = form
        self._sizes = [tensor.numel() for tensor in values]
        self._kept = (values, given.get("residuals"))  # the second step reads them again
        workspace = given["workspace"]
        with encoding(values, per_byte=8, **given) as batch:
            self._batch, largest = batch, batch.largest()
            found = kth_largest(batch, workspace.upload("select.ks", np.array(ks, np.int64)))
            self._bounds, self._quotas = found.bits, torch.where(found.bits > 0, found.quota, 0)
            self._allowed = allow(largest, largest, together=given.get("together", False))
            counts = workspace.array("select.counts", 2 * batch.num_blocks, torch.int64)
            _count[(batch.num_blocks,)](self._bounds, counts, **batch.launch)
            # Of all blocks before each, and of those of its own tensor.
            ends = counts.view(2, -1).cumsum(1)
            last = ends[:, batch.last_blocks]
            before = torch.nn.functional.pad(last[:, :-1], (1, 0))
            self._before, self._ends = before.t().contiguous(), ends
            above, equal = last - before
            facts = workspace.array("select.facts", 2 * batch.num_tensors, torch.float64).view(2, -1)
            facts[0].copy_(largest)
            facts[1].copy_(above + torch.minimum(equal, self._quotas))
            self._facts = workspace.host("select.facts", 2 * batch.num_tensors, torch.float64)
            self._facts.copy_(facts.view(-1), non_blocking=True)

    def finish(self) -> list[Chosen]:
        """Waits for the counts, writes the payloads and residuals, and waits for the payloads. Call once.

        Raises:
            Whatever `form` raises; no residual was changed then.
        """
        batch = self._batch
        workspace = batch.workspace
        workspace.synchronize()
        largest, counts = (row.tolist() for row in self._facts.numpy().reshape(2, -1))
        plans, total = [], 0
        for size, count in zip(self._sizes, map(int, counts), strict=True):
            form = self._form(size, count)
            places = -(-size // 8) if form.bitmap else -(-count * form.width // 8)
            body = count * batch.dtype.itemsize
            plans.append((count, form, total, places, total + _aligned(places), body))
            total += _aligned(places) + _aligned(body)
        told = np.array([(form.width * (not form.bitmap), at, behind) for _, form, at, _, behind, _ in plans], np.int64)
        with workspace.running():
            payload = workspace.array("select.payload", total // 4, torch.int32).zero_()
            _write[(batch.num_blocks,)](
                self._bounds,
                self._quotas,
                self._allowed,
                self._before,
                self._ends,
                workspace.upload("select.plans", told),
                payload,
                payload.view(torch.uint8),
                payload.view(batch.dtype),
                **batch.launch,
            )
            host = workspace.host("select.payload", 4 * payload.numel(), torch.uint8)
            host.copy_(payload.view(torch.uint8), non_blocking=True)
        workspace.synchronize()
        received: NDArray[np.uint8] = host.numpy()
        return [
            Chosen(top, count, form.bitmap, received[at : at + places], received[behind : behind + body])
            for top, (count, form, at, places, behind, body) in zip(largest, plans, strict=True)
        ]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def scatter(
    positions: NDArray[np.int64],
    values: NDArray[Any],
    *,
    out: torch.Tensor,
    accumulate: bool = False,
    workspace: DeviceWorkspace,
) -> None:
    """Writes (or adds) values at ascending positions of flat `out`, which is else filled with zeros; does not wait.

    Args:
        positions: below out's size; the caller has checked them.
        values: in the type of `out`.
    """
    narrow = positions.astype(np.int32) if out.numel() < 1 << 31 else positions
    with workspace.decoding():
        there = workspace.upload("scatter.positions", narrow), workspace.upload("scatter.values", values)
        if not accumulate:
            out.zero_()
        if positions.size:
            grid = (-(-positions.size // _BLOCK),)
            _scatter[grid](*there, out, positions.size, ACCUMULATE=accumulate, BLOCK=_BLOCK)


@triton.jit
def _compare(v: tl.tensor, known: tl.tensor, bound: tl.tensor) -> tl.tensor:
    """Of each value, 1 or 0: whether its magnitude is above the bound; whether it equals it."""
    bits = magnitude_bits(v).to(tl.int64)
    return (known & (bits > bound)).to(tl.int32), (known & (bits == bound)).to(tl.int32)


@triton.jit
def _before_in_block(flags: tl.tensor) -> tl.tensor:
    """How many flags [BLOCK, WIDTH] are set before each, in the order of the values."""
    rows = tl.sum(flags, axis=1)
    return (tl.cumsum(rows, axis=0) - rows)[:, None] + tl.cumsum(flags, axis=1) - flags


@triton.jit
def _count(bounds: tl.tensor, counts: tl.tensor, batch: Tables) -> None:
    tensor, byte = find_block(batch)
    _, known, v = load_block(batch, tensor, byte)
    above, equal = _compare(v, known, tl.load(bounds + tensor))
    program = tl.program_id(0)
    tl.store(counts + program, tl.sum(above).to(tl.int64))
    tl.store(counts + tl.num_programs(0) + program, tl.sum(equal).to(tl.int64))


@triton.jit
def _write(
    bounds: tl.tensor,
    quotas: tl.tensor,
    allowed: tl.tensor,
    before: tl.tensor,
    ends: tl.tensor,
    plans: tl.tensor,
    words: tl.tensor,
    octets: tl.tensor,
    numbers: tl.tensor,
    batch: Tables,
) -> None:
    """`words`, `octets` and `numbers` are the payload's memory, as integers, bytes and values."""
    tensor, byte = find_block(batch)
    index, known, v = load_block(batch, tensor, byte)
    bound, quota = tl.load(bounds + tensor), tl.load(quotas + tensor)
    above, equal = _compare(v, known, bound)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    above_before = tl.load(ends + program - 1, mask=program > 0, other=0) - tl.load(before + 2 * tensor)
    equal_before = tl.load(ends + num_programs + program - 1, mask=program > 0, other=0)
    equal_before -= tl.load(before + 2 * tensor + 1)
    above_rank = above_before + _before_in_block(above)
    equal_rank = equal_before + _before_in_block(equal)
    sent = (above != 0) | ((equal != 0) & (equal_rank < quota))
    rank = above_rank + tl.minimum(equal_rank, quota)
    if batch.RESIDUAL:
        store_residual(batch, tensor, 0, index, known, allowed, tl.where(sent, 0.0, v))
    width = tl.load(plans + 3 * tensor)  # 0 for a bitmap
    places, body = tl.load(plans + 3 * tensor + 1), tl.load(plans + 3 * tensor + 2)
    num_bytes, _ = byte_span(batch, tensor)
    flag = sent.to(tl.int32) << (7 - tl.arange(0, batch.WIDTH))[None, :]
    tl.store(octets + places + byte, tl.sum(flag, axis=1).to(tl.uint8), mask=(byte < num_bytes) & (width == 0))
    indexed = sent & (width > 0)
    bit = rank * width
    spread = index << (bit & 31)
    at = words + places // 4 + (bit >> 5)
    tl.atomic_or(at, (spread & 0xFFFFFFFF).to(tl.int32), mask=indexed, sem="relaxed")
    high = (spread >> 32).to(tl.int32)
    tl.atomic_or(at + 1, high, mask=indexed & (high != 0), sem="relaxed")
    tl.store(numbers + body // (v.dtype.primitive_bitwidth // 8) + rank, v, mask=sent)


@triton.jit(do_not_specialize=["count"])
def _scatter(
    positions: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = at < count
    position = tl.load(positions + at, mask=known, other=0)
    value = tl.load(values + at, mask=known, other=0.0)
    put(out, position, value, known, ACCUMULATE)
