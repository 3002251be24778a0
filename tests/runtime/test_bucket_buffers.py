"""Buckets of gradients as values to compute with, and back."""

from __future__ import annotations

import torch

from thinwire.runtime.bucket_buffers import BucketBuffer

INF = torch.inf


def test_infinite_gradients_stay_infinite_and_averages_end_at_the_largest_number_of_the_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        buffer = BucketBuffer(torch.tensor([1.0, INF, -INF, torch.nan], dtype=dtype), None, torch.futures.Future())
        values = torch.as_tensor(buffer.values())
        values += 0.5
        buffer.fill(values, keeps_inf=True)
        assert buffer.buffer[0] == 1.5 and buffer.buffer.isinf().tolist() == [False, True, True, False]
        assert buffer.buffer[3].isnan()
    buffer = BucketBuffer(torch.zeros(2, dtype=torch.float16), None, torch.futures.Future())
    buffer.fill(torch.tensor([1e6, -1e6]))
    assert buffer.buffer.tolist() == [65504.0, -65504.0]
