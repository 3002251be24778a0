"""The k largest magnitudes of every block of a tensor, and the residual without them: `blocktopk` of a batch.

A program selects from one block, of any size, a chunk at a time: it counts the magnitudes' leading bytes, then the next
bytes of those that share the k-th largest's, and so on, as `order` does for a whole tensor; then it writes places and
values of what is sent, in ascending order. How many values a block may send is known before, so every block has room
of its own, and nobody waits for counts.

The levels that the values are rounded to are sums over a whole tensor, in order, and the positions are entropy coded:
the host does that, of the selected values alone. It says in a byte each which level they have, and what the levels are
worth, and a second launch takes that off the residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from thinwire.kernels.numba.blocktopk import Blocks, Selected
from thinwire.kernels.triton.batch import (
    NUMPY_TYPES,
    Given,
    Tables,
    allow,
    encoding,
    load_sum,
    magnitude_bits,
    store_residual,
)

CHUNK = 4096  # the most values that a program holds at once
_LEAST_CHUNK = 256
_PER_WARP = 512  # values of a chunk
_DIGIT = 8  # bits
_BINS = tl.constexpr(1 << _DIGIT)

# Columns of the plan, one row a tensor.
_COLUMNS, _TILE_ROWS, _TILE_COLUMNS, _ACROSS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_K, _WHOLE, _FIRST_BLOCK, _FIRST_SLOT = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
_PLANNED = tl.constexpr(8)

Levels = Callable[[NDArray[Any], NDArray[np.uint8]], NDArray[Any]]
"""Fills the level of each value and returns what the levels are worth, in the type of the values."""


class Rounded(NamedTuple):
    """The selected values of one tensor, the level of each (uint8), and what every level is worth."""

    selected: Selected
    codes: NDArray[np.uint8]
    worth: NDArray[Any]


class Picked(NamedTuple):
    """What one tensor was encoded to: its largest magnitude, and what is sent; None where the tensor is refused."""

    largest: float
    rounded: Rounded | None


class SelectedBlocks:
    """A batch whose selections are on their way, of non-empty tensors.

    Args:
        values: as in `thinwire.kernels.triton.ternary.encode_ternary`, and so is what is `given`.
        blocks: how each tensor is cut.
        most: the largest magnitude that is sent; a tensor with a larger one is refused.
        levels: rounds the selected values of one tensor.
        num_levels: how many levels there are, at most 256.
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        *,
        blocks: Sequence[Blocks],
        most: float,
        levels: Levels,
        num_levels: int,
        **given: Unpack[Given],
    ) -> None:
        self._levels, self._num_levels = levels, num_levels
        self._rooms = [(each.number, _room(each)) for each in blocks]
        self._kept = given.get("residuals")
        with encoding(values, per_byte=1, **given) as batch:
            self._batch, workspace = batch, batch.workspace
            largest = batch.largest()
            # There is no scale. What stands for it stops a tensor whose largest value is finite and above `most`.
            refused = torch.where(largest <= most, 0.0, torch.inf)
            plan, owners, num_slots = _plan(blocks)
            found = {
                "counts": workspace.array("blocks.counts", owners.size, torch.int32),
                "places": workspace.array("blocks.places", num_slots, torch.int32),
                "sent": workspace.array("blocks.sent", num_slots, batch.dtype),
            }
            self._launch: dict[str, Any] = {
                **batch.launch,
                **found,
                "plan": workspace.upload("blocks.plan", plan),
                "owners": workspace.upload("blocks.owners", owners),
                "allowed": allow(largest, refused, together=given.get("together", False)),
            }
            # By what the codec says of a block, not by the tensors: these are constants of the machine code.
            self._k, whole = max(each.k for each in blocks), max(each.block for each in blocks)
            chunk = min(CHUNK, max(_LEAST_CHUNK, triton.next_power_of_2(whole)))
            _select[(owners.size,)](
                **self._launch | {"num_warps": max(1, chunk // _PER_WARP)},
                PASSES=batch.dtype.itemsize * 8 // _DIGIT,
                CHUNK=chunk,
                NUM_CHUNKS=-(-whole // chunk),
            )
            self._found = []
            for name, tensor in (found | {"largest": largest, "refused": refused}).items():
                copy = workspace.host(f"blocks.{name}", tensor.numel(), tensor.dtype)
                self._found.append(copy.copy_(tensor, non_blocking=True))

    def finish(self) -> list[Picked]:
        """Waits for the selected values, rounds them, and waits until the residuals are without them. Call once."""
        batch, workspace = self._batch, self._batch.workspace
        workspace.synchronize()
        counts, places, sent, largest, refused = (each.numpy() for each in self._found)
        codes = np.zeros(places.size, np.uint8)
        worth = np.zeros((batch.num_tensors, self._num_levels), NUMPY_TYPES[batch.dtype])
        picked, block, slot = [], 0, 0
        for tensor, (number, room) in enumerate(self._rooms):
            own = slice(slot, slot + number * room)
            per_block = counts[block : block + number].copy()
            filled = (np.arange(room) < per_block[:, None]).reshape(-1)
            block, slot = block + number, own.stop
            if refused[tensor] or not np.isfinite(largest[tensor]):
                picked.append(Picked(float(largest[tensor]), None))
                continue
            selected = Selected(per_block, places[own][filled], sent[own][filled])
            levels = np.empty(selected.values.size, np.uint8)
            worth[tensor] = self._levels(selected.values, levels)
            codes[own][filled] = levels
            picked.append(Picked(float(largest[tensor]), Rounded(selected, levels, worth[tensor])))
        if self._kept is not None:
            with workspace.running():
                _take[(counts.size,)](
                    codes=workspace.upload("blocks.codes", codes),
                    worth=workspace.upload("blocks.worth", worth),
                    num_levels=self._num_levels,
                    CHUNK=_LEAST_CHUNK,
                    NUM_CHUNKS=-(-self._k // _LEAST_CHUNK),
                    **self._launch | {"num_warps": 1},
                )
            workspace.synchronize()
        return picked


def _room(blocks: Blocks) -> int:
    """The most values that a block sends."""
    return -(-blocks.k * blocks.tile_rows * blocks.tile_columns // blocks.block)


def _plan(blocks: Sequence[Blocks]) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """The plan; the tensor of every block; and how many values all blocks together may send."""
    rows, num_blocks, num_slots = [], 0, 0
    for each in blocks:
        across = -(-each.columns // each.tile_columns)
        tile = each.columns, each.tile_rows, each.tile_columns, across
        rows.append((*tile, each.k, each.block, num_blocks, num_slots))
        num_blocks += each.number
        num_slots += each.number * _room(each)
    return np.array(rows, np.int64), np.repeat(np.arange(len(blocks)), [each.number for each in blocks]), num_slots


@triton.jit
def _find(plan: tl.tensor, owners: tl.tensor) -> tl.tensor:
    """The tensor whose block this program has, its row of the plan, and the block's first value, width and rows."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    row = plan + _PLANNED * tensor
    block = program - tl.load(row + _FIRST_BLOCK)
    columns, rows = tl.load(row + _COLUMNS), tl.load(row + _TILE_ROWS)
    tile_columns, across = tl.load(row + _TILE_COLUMNS), tl.load(row + _ACROSS)
    left = block % across * tile_columns
    first = block // across * rows * columns + left
    return tensor, row, block, first, tl.minimum(tile_columns, columns - left), rows


@triton.jit
def _share(row: tl.tensor, size: tl.tensor) -> tl.tensor:
    """How many of a block's `size` values are sent, unless they are zeros."""
    whole = tl.load(row + _WHOLE)
    return (tl.load(row + _K) * size + whole - 1) // whole


@triton.jit
def _first_slot(row: tl.tensor, block: tl.tensor) -> tl.tensor:
    """Where a block's places and values begin."""
    room = _share(row, tl.load(row + _TILE_ROWS) * tl.load(row + _TILE_COLUMNS))
    return tl.load(row + _FIRST_SLOT) + block * room


@triton.jit
def _index(row: tl.tensor, first: tl.tensor, width: tl.tensor, place: tl.tensor) -> tl.tensor:
    """Where in the tensor a place of a block lies."""
    down = place // width.to(tl.int32)
    return first + down * tl.load(row + _COLUMNS) + (place - down * width)


@triton.jit
def _select(
    plan: tl.tensor,
    owners: tl.tensor,
    counts: tl.tensor,
    places: tl.tensor,
    sent: tl.tensor,
    allowed: tl.tensor,
    batch: Tables,
    PASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
) -> None:
    tensor, row, block, first, width, rows = _find(plan, owners)
    size = width * rows
    left = _share(row, size)
    prefix = left * 0
    for step in range(PASSES):
        shift = 8 * (PASSES - 1 - step)
        found = tl.zeros([_BINS], tl.int32)
        for chunk in range(NUM_CHUNKS):
            place = chunk * CHUNK + tl.arange(0, CHUNK)
            known = place < size
            v = load_sum(batch, tensor, 0, _index(row, first, width, place), known)
            bits = magnitude_bits(v).to(tl.int64) >> shift
            found += tl.histogram((bits & 255).to(tl.int32), _BINS, mask=known & (bits >> 8 == prefix))
        at_least = tl.sum(found) - tl.cumsum(found, axis=0) + found
        digit = tl.sum((at_least >= left).to(tl.int32)) - 1
        prefix = (prefix << 8) + digit
        left -= tl.sum(tl.where(tl.arange(0, _BINS) > digit, found, 0))
    # What is left are the first of those that equal the bound; zeros are not sent.
    quota = tl.where(prefix > 0, left, 0)
    slot, num_equal, num_sent = _first_slot(row, block), quota * 0, quota * 0
    for chunk in range(NUM_CHUNKS):
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        known = place < size
        index = _index(row, first, width, place)
        v = load_sum(batch, tensor, 0, index, known)
        bits = magnitude_bits(v).to(tl.int64)
        equal = (known & (bits == prefix)).to(tl.int32)
        rank = num_equal + tl.cumsum(equal, axis=0) - equal
        chosen = known & ((bits > prefix) | ((bits == prefix) & (rank < quota)))
        flag = chosen.to(tl.int32)
        at = slot + num_sent + tl.cumsum(flag, axis=0) - flag
        tl.store(places + at, place, mask=chosen)
        tl.store(sent + at, v, mask=chosen)
        if batch.RESIDUAL:
            store_residual(batch, tensor, 0, index, known, allowed, v)
        num_equal += tl.sum(equal)
        num_sent += tl.sum(flag)
    tl.store(counts + tl.program_id(0), num_sent.to(tl.int32))


@triton.jit(do_not_specialize=["num_levels"])
def _take(
    plan: tl.tensor,
    owners: tl.tensor,
    counts: tl.tensor,
    places: tl.tensor,
    sent: tl.tensor,
    allowed: tl.tensor,
    codes: tl.tensor,
    worth: tl.tensor,
    num_levels: tl.tensor,
    batch: Tables,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
) -> None:
    """Takes what the selected values travel as off the residual, which holds them."""
    tensor, row, block, first, width, _ = _find(plan, owners)
    slot, count = _first_slot(row, block), tl.load(counts + tl.program_id(0))
    for chunk in range(NUM_CHUNKS):
        rank = chunk * CHUNK + tl.arange(0, CHUNK)
        known = rank < count
        place = tl.load(places + slot + rank, mask=known, other=0)
        code = tl.load(codes + slot + rank, mask=known, other=0).to(tl.int32)
        v = tl.load(sent + slot + rank, mask=known, other=0.0)
        unsent = v - tl.load(worth + tensor * num_levels + code, mask=known, other=0.0)
        store_residual(batch, tensor, 0, _index(row, first, width, place), known, allowed, unsent)
