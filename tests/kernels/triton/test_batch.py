"""The table that shares programs out among tensors."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from thinwire.kernels.triton import batch
from thinwire.kernels.triton.batch import Batch
from thinwire.kernels.triton.workspace import DeviceWorkspace

pytestmark = pytest.mark.gpu


def largest(values: list[Any], residuals: list[Any] | None, device: torch.device, **options: Any) -> list[float]:
    space = DeviceWorkspace(device)
    tensors = [torch.as_tensor(value, device=device) for value in values]
    kept = None if residuals is None else [torch.as_tensor(r, device=device) for r in residuals]
    space.follow()
    with space.running():
        found = Batch(tensors, kept, workspace=space, **options).largest()
    space.synchronize()
    return [float(value) for value in found.cpu()]


def test_every_value_is_seen_by_some_program(device: torch.device) -> None:
    for per_byte, dtype in product((1, 5, 8), ("float32", "float64")):
        size = batch.TILE + 3
        values = [np.zeros(size, dtype) for _ in range(20)]
        for at, value in enumerate(values):
            value[at * (size - 1) // 19] = -1.0 - at
        assert largest(values, None, device, per_byte=per_byte) == [1.0 + at for at in range(20)], (per_byte, dtype)


def test_the_sum_is_what_counts(device: torch.device) -> None:
    values, residuals = np.array([1.0, 2.0], np.float32), np.array([8.0, -16.0], np.float32)
    assert largest([values], [residuals], device, per_byte=5, factors=0.5) == [6.0]


def test_nan_and_inf_come_out_on_top_of_their_own_tensor(device: torch.device) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        values = [np.ones(5, np.float32), np.array([1.0, bad, 3e38], np.float32), np.zeros(4, np.float32)]
        found = largest(values, None, device, per_byte=5)
        assert found[0] == 1.0 and not np.isfinite(found[1]) and found[2] == 0.0, bad
