"""The table that shares programs out among tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from thinwire.kernels.triton.batch import TILE, Batch
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


@pytest.mark.parametrize("per_byte", [1, 5, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_value_is_seen_by_some_program(device: torch.device, per_byte: int, dtype: str) -> None:
    size = TILE + 3
    values = [np.zeros(size, dtype) for _ in range(20)]
    for at, value in enumerate(values):
        value[at * (size - 1) // 19] = -1.0 - at
    assert largest(values, None, device, per_byte=per_byte) == [1.0 + at for at in range(20)]


def test_the_sum_is_what_counts(device: torch.device) -> None:
    values, residuals = np.array([1.0, 2.0], np.float32), np.array([8.0, -16.0], np.float32)
    assert largest([values], [residuals], device, per_byte=5, residual_scale=0.5) == [6.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_come_out_on_top_of_their_own_tensor(device: torch.device, bad: float) -> None:
    values = [np.ones(5, np.float32), np.array([1.0, bad, 3e38], np.float32), np.zeros(4, np.float32)]
    found = largest(values, None, device, per_byte=5)
    assert found[0] == 1.0 and not np.isfinite(found[1]) and found[2] == 0.0
