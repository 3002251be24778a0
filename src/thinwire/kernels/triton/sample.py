"""The magnitude that a fraction of a sample reaches, for each tensor of a batch; the sample is the CPU's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from thinwire.kernels.triton.batch import Batch, Tables, byte_span, find_block, load_sum, num_values
from thinwire.kernels.triton.order import kth_largest
from thinwire.kernels.triton.stochastic import draw


def sampled_bounds(
    batch: Batch, values: Sequence[torch.Tensor], samples: Sequence[int], fraction: float
) -> torch.Tensor:
    """The magnitude bits that the given fraction of each tensor's sample reaches."""
    workspace = batch.workspace
    sizes = [min(size, tensor.numel()) for size, tensor in zip(samples, values, strict=True)]
    ends = np.cumsum(sizes)
    sampled = workspace.array("sample.values", int(ends[-1]), batch.dtype)
    pieces = [sampled[end - size : end] for end, size in zip(ends.tolist(), sizes, strict=True)]
    places = Batch(pieces, None, per_byte=1, workspace=workspace, name="sample")
    _sample[(places.num_blocks,)](places.tables, sampled, batch.tables, enable_fp_fusion=False)
    ks = np.array([max(1, round(fraction * size)) for size in sizes], np.int64)
    return kth_largest(places, workspace.upload("sample.ks", ks)).bits


@triton.jit
def _sample(places: Tables, sampled: tl.tensor, batch: Tables) -> None:
    """One value from a random place of each of equal stretches; all values where the sample is the tensor."""
    tensor, at = find_block(places)
    count, first = byte_span(places, tensor)
    size = num_values(batch, tensor)
    begin, end = at * size // count, (at + 1) * size // count
    zero = tl.zeros_like(at)
    index = begin + (draw(at, zero, zero).to(tl.int64) * (end - begin) >> 24)
    known = at < count
    v = load_sum(batch, tensor, index, known)
    tl.store(sampled + first + at, v, mask=known)
