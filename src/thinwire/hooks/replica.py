"""The worker's copy of one tensor: float32 values that deltas are added to, and the tensor that shows them.

A contiguous float32 tensor on the CPU is its own copy: deltas are added in place, with no temporary. Any other
(half precision, on a GPU, channels last) gets a float32 copy beside it, so that small deltas are not rounded away
and every worker holds the same bits.
"""

from __future__ import annotations

import numpy as np
import torch

from thinwire.codecs.decoding import decode_into
from thinwire.codecs.tensors import FloatArray
from thinwire.worker.core import Update


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

    def apply(self, updates: list[Update]) -> tuple[int, int]:
        """Adds deltas, takes over whole values, and shows the result.

        Returns:
            Payload bytes and number of values of the state changes among them; initial values are none.
        """
        payload_nbytes = num_values = 0
        for update in updates:
            if update.frame:
                nbytes = decode_into(update.frame, self.values, accumulate=not update.whole)
                if update.version > 0:
                    payload_nbytes += nbytes
                    num_values += self.values.size
        if updates and self._apart:
            self._tensor.copy_(torch.from_numpy(self.values))
        return payload_nbytes, num_values
