"""What a batch was encoded to: on the device at first, on the host when somebody asks.

Sizes and scales of all tensors travel to the host in one small copy, queued right behind the kernels. Asking waits
for that copy, the one wait that learns how much there is; then exactly the compressed bytes are copied.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.kernels.gpu.batch import Batch


class Sent(NamedTuple):
    """What one tensor was encoded to.

    Attributes:
        finite: False where NaN, Inf or an overflowing scale was met.
        largest: the largest magnitude.
        scale: the scale to send.
        payload: a view into pinned memory, valid until the workspace's next use.
    """

    finite: bool
    largest: float
    scale: float
    payload: NDArray[np.uint8]


def allow(batch: Batch, largest: torch.Tensor, scales: torch.Tensor, *, together: bool) -> torch.Tensor:
    """Which tensors may change their residual, int8[num_tensors]: finite ones; if `together`, all of them or none."""
    finite = torch.isfinite(largest) & torch.isfinite(scales)
    if together:
        finite &= finite.all()
    return finite.to(torch.int8)


class Pending:
    """Payloads on their way; made inside `workspace.running()`.

    Args:
        batch: what was encoded.
        largest: [num_tensors].
        scales: [num_tensors].
        payload: uint8 on the device, the payloads of all tensors one behind the other.
        ends: int64[num_tensors] on the device, where each payload ends; None: as many bytes as the batch has.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        largest: torch.Tensor,
        scales: torch.Tensor,
        payload: torch.Tensor,
        ends: torch.Tensor | None = None,
    ) -> None:
        self._batch, self._payload, self._sized = batch, payload, ends is not None
        workspace, size = batch.workspace, batch.num_tensors
        facts = workspace.array("pending.facts", 3 * size, torch.float64)  # exact for sizes up to 2**53
        facts[:size].copy_(largest)
        facts[size : 2 * size].copy_(scales)
        if ends is not None:
            facts[2 * size :].copy_(ends)
        self._facts = workspace.host("pending.facts", 3 * size, torch.float64)
        self._facts.copy_(facts, non_blocking=True)

    def finish(self) -> list[Sent]:
        """Waits for the sizes, then for the compressed bytes. Call once."""
        workspace = self._batch.workspace
        workspace.synchronize()
        largest, scales, ends = self._facts.numpy().reshape(3, -1)
        stops = (ends.astype(np.int64) if self._sized else self._batch.ends).tolist()
        host = workspace.host("pending.payload", stops[-1], torch.uint8)
        with workspace.running():
            host.copy_(self._payload[: stops[-1]], non_blocking=True)
        workspace.synchronize()
        received: NDArray[np.uint8] = host.numpy()
        finite = (np.isfinite(largest) & np.isfinite(scales)).tolist()
        starts = [0, *stops[:-1]]
        payloads = [received[start:stop] for start, stop in zip(starts, stops, strict=True)]
        return [Sent(*sent) for sent in zip(finite, largest.tolist(), scales.tolist(), payloads, strict=True)]
