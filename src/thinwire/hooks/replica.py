"""The worker's copy of one tensor: float32 values that updates change, and the tensor that shows them.

A contiguous float32 tensor on the CPU is its own copy: deltas are added in place, with no temporary. Any other
(half precision, on a GPU, channels last) gets a float32 copy beside it, so that small deltas are not rounded away
and every worker holds the same bits.
"""

from __future__ import annotations

import numpy as np
import torch

from thinwire.codecs.tensors import FloatArray


class Replica:
    """A tensor and its float32 values.

    Args:
        tensor: a parameter or buffer of the model; changed in place, outside autograd.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        own = self._tensor.device.type == "cpu" and self._tensor.dtype == torch.float32 and tensor.is_contiguous()
        if own:
            self.values: FloatArray = self._tensor.numpy()
        else:
            self.values = np.ascontiguousarray(self._tensor.to(device="cpu", dtype=torch.float32).numpy())
        self._apart = not own

    def refresh(self) -> None:
        """Takes over the tensor's values, after something else changed them."""
        if self._apart:
            self.values[...] = self._tensor.to(device="cpu", dtype=torch.float32).numpy()

    def show(self) -> None:
        """Lets the tensor have the values."""
        if self._apart:
            self._tensor.copy_(torch.from_numpy(self.values))

    def piece(self, start: int, stop: int, shape: tuple[int, ...]) -> FloatArray:
        """A view of some values, in the shape of their table."""
        view: FloatArray = self.values.reshape(-1)[start:stop].reshape(shape)
        return view
