"""The worker's copy of one tensor: float32 values that updates change, and the tensor that shows them.

A contiguous float32 tensor is its own copy: deltas are added in place, with no temporary. Any other (half precision,
channels last) gets a float32 copy beside it, so that small deltas are not rounded away and every worker holds the same
bits. Either lies where the tensor lies: what is decoded for a tensor on a GPU is written there.
"""

from __future__ import annotations

import torch

from thinwire.codecs.tensors import FloatArray, off_host


class Replica:
    """A tensor and its float32 values.

    Args:
        tensor: a parameter or buffer of the model; changed in place, outside autograd.

    Attributes:
        values: float32, flat, on the tensor's device; the tensor's own memory where it can be.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._apart = self._tensor.dtype != torch.float32 or not tensor.is_contiguous()
        self.values = self._flat().clone() if self._apart else self._tensor.view(-1)

    def refresh(self) -> None:
        """Takes over the tensor's values, after something else changed them."""
        if self._apart:
            self.values.copy_(self._flat())

    def show(self) -> None:
        """Lets the tensor have the values."""
        if self._apart:
            self._tensor.copy_(self.values.view(self._tensor.shape))

    def piece(self, start: int, stop: int, shape: tuple[int, ...]) -> FloatArray | torch.Tensor:
        """A view of some values, in the shape of their table; a NumPy array where NumPy sees them."""
        view = self.values[start:stop].view(shape)
        if off_host(view):
            return view
        array: FloatArray = view.numpy()
        return array

    def _flat(self) -> torch.Tensor:
        return self._tensor.to(torch.float32).contiguous().view(-1)
