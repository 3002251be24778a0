"""The largest magnitude of each of many tensors, by one launch and one wait."""

from __future__ import annotations

import torch

from thinwire.kernels.triton.batch import Arrays, Batch
from thinwire.kernels.triton.workspace import DeviceWorkspace


def largest_of_many(arrays: Arrays, workspace: DeviceWorkspace) -> list[float]:
    """Returns the largest magnitude of each; NaN or Inf where one value is. Waits for them.

    Args:
        arrays: on the workspace's device.
        workspace: that nobody else uses until this returns.
    """
    workspace.follow()
    with workspace.running():
        found = Batch(arrays, None, per_byte=1, workspace=workspace).largest()
        told = workspace.host("largest.told", arrays.sizes.size, torch.float64)
        told.copy_(found.to(torch.float64), non_blocking=True)
    workspace.synchronize()
    return list(told.tolist())
