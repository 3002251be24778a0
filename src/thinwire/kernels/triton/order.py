"""The k-th largest magnitude of each tensor of a batch, exactly and without sorting: eight bits at a time.

Magnitude bits, read as integers, order like magnitudes. Count how many values have each of the 256 leading bytes; the
byte in which the k-th largest lies is then known, and how many lie above it. Count the next byte of the values that
share it, and so on to the last: four passes over float32, eight over float64, whatever the values are. What is left of
k then says how many of the values equal to the k-th belong to the k largest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from thinwire.kernels.triton.batch import (
    Batch,
    Tables,
    find_block,
    load_block,
    magnitude_bits,
)

_DIGIT = 8  # bits
_BINS = tl.constexpr(1 << _DIGIT)


class Kth(NamedTuple):
    """int64[num_tensors] each: the magnitude bits of the k-th largest, and how many equal to it are among the k."""

    bits: torch.Tensor
    quota: torch.Tensor


def kth_largest(batch: Batch, ks: torch.Tensor) -> Kth:
    """Finds the ks[i]-th largest magnitude of tensor i; NaN counts as the largest of all.

    Args:
        batch: made inside `workspace.running()`, where this belongs too.
        ks: int64[num_tensors], 1 … n each.
    """
    prefix, left = torch.zeros_like(ks), ks
    counts = batch.workspace.array(f"{batch.name}.counts", batch.num_tensors * _BINS.value, torch.int64)
    for shift in range(8 * batch.dtype.itemsize - _DIGIT, -1, -_DIGIT):
        counts.zero_()
        _count_digits[(batch.num_blocks,)](prefix, counts, shift, **batch.launch)
        from_above = counts.view(-1, _BINS.value).flip(1)
        reached = from_above.cumsum(1)
        place = (reached[:, :-1] < left[:, None]).sum(1, keepdim=True)  # the last bin has whatever is not in others
        above = (reached - from_above).gather(1, place)[:, 0]
        prefix, left = (prefix << _DIGIT) + (_BINS.value - 1 - place[:, 0]), left - above
    return Kth(prefix, left)


@triton.jit(do_not_specialize=["shift"])
def _count_digits(prefix: tl.tensor, counts: tl.tensor, shift: tl.tensor, batch: Tables) -> None:
    tensor, byte = find_block(batch)
    _, known, v = load_block(batch, tensor, byte)
    bits = magnitude_bits(v).to(tl.int64) >> shift
    counted = known & (bits >> 8 == tl.load(prefix + tensor))
    digit = tl.reshape((bits & 255).to(tl.int32), [batch.BLOCK * batch.WIDTH])
    found = tl.histogram(digit, _BINS, mask=tl.reshape(counted, [batch.BLOCK * batch.WIDTH]))
    bin = tl.arange(0, _BINS)
    # Most bins are empty: gradients have few exponents.
    tl.atomic_add(counts + tensor * _BINS + bin, found.to(tl.int64), mask=found > 0, sem="relaxed")
