"""Buffers that grow, stay, and carry data over."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thinwire.kernels.triton.workspace import DeviceWorkspace

pytestmark = pytest.mark.gpu


def test_a_buffer_is_the_same_memory_until_it_must_grow(device: torch.device) -> None:
    space = DeviceWorkspace(device)
    first = space.array("a", 100, torch.uint8)
    assert space.array("a", 50, torch.uint8).data_ptr() == first.data_ptr()
    assert space.array("b", 50, torch.uint8).data_ptr() != first.data_ptr()
    assert space.array("a", 200, torch.uint8).numel() == 200
    assert space.nbytes == 250


def test_host_buffers_are_pinned_where_there_is_a_gpu(device: torch.device) -> None:
    assert DeviceWorkspace(device).host("a", 10, torch.float64).is_pinned() == (device.type == "cuda")


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64])
def test_what_is_uploaded_arrives(device: torch.device, dtype: type) -> None:
    space = DeviceWorkspace(device)
    for data in (np.arange(20), np.arange(5)[::-1]):
        space.follow()
        with space.running():
            uploaded = space.upload("a", data.astype(dtype))
        space.synchronize()
        assert uploaded.device.type == device.type
        assert uploaded.cpu().numpy().tolist() == data.tolist()
