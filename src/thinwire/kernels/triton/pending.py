"""What a batch was encoded to: on the device at first, on the host when somebody asks.

Sizes and scales of all tensors travel to the host in one small copy, queued right behind the kernels. Asking waits
for that copy, the one wait that learns how much there is; then exactly the compressed bytes are copied.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.kernels.triton.batch import Batch


class Sent(NamedTuple):
    """What one tensor was encoded to.

    Attributes:
        finite: False where NaN, Inf or an overflowing scale was met.
        largest: the largest magnitude.
        scale: the scale to send.
        limit: what the scale must reach; 0 where it is the tensor's own.
        payload: a view into pinned memory, valid until the workspace's next use.
    """

    finite: bool
    largest: float
    scale: float
    limit: float
    payload: NDArray[np.uint8]


def allow(
    largest: torch.Tensor, scales: torch.Tensor, limits: torch.Tensor | None = None, *, together: bool
) -> torch.Tensor:
    """Which tensors may change their residual, int8[num_tensors]: finite ones; if `together`, all of them or none.

    A scale below its limit is the caller's mistake, so it stops all of them.
    """
    finite = torch.isfinite(largest) & torch.isfinite(scales)
    if together:
        finite &= finite.all()
    if limits is not None:
        finite &= ~(scales < limits).any()
    return finite.to(torch.int8)


class Pending:
    """Payloads on their way; made inside `workspace.running()`.

    Args:
        batch: what was encoded.
        largest: [num_tensors].
        scales: [num_tensors].
        payload: uint8 on the device, the payloads of all tensors one behind the other.
        ends: int64[num_tensors] on the device, where each payload ends; None: as many bytes as the batch has.
        limits: [num_tensors], what scales must reach; None: nothing.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        largest: torch.Tensor,
        scales: torch.Tensor,
        payload: torch.Tensor,
        ends: torch.Tensor | None = None,
        limits: torch.Tensor | None = None,
    ) -> None:
        self._batch, self._payload, self._sized = batch, payload, ends is not None
        workspace, size = batch.workspace, batch.num_tensors
        facts = workspace.array("pending.facts", 4 * size, torch.float64).view(4, size)  # exact for sizes to 2**53
        for row, fact in zip(facts, (largest, scales, limits, ends), strict=True):
            row.zero_() if fact is None else row.copy_(fact)
        self._facts = workspace.host("pending.facts", 4 * size, torch.float64)
        self._facts.copy_(facts.view(-1), non_blocking=True)

    def finish(self) -> list[Sent]:
        """Waits for the sizes, then for the compressed bytes. Call once."""
        workspace = self._batch.workspace
        workspace.synchronize()
        largest, scales, limits, ends = self._facts.numpy().reshape(4, -1)
        stops = (ends.astype(np.int64) if self._sized else self._batch.ends).tolist()
        host = workspace.host("pending.payload", stops[-1], torch.uint8)
        with workspace.running():
            host.copy_(self._payload[: stops[-1]], non_blocking=True)
        workspace.synchronize()
        received: NDArray[np.uint8] = host.numpy()
        finite = (np.isfinite(largest) & np.isfinite(scales)).tolist()
        starts = [0, *stops[:-1]]
        payloads = [received[start:stop] for start, stop in zip(starts, stops, strict=True)]
        facts = zip(finite, largest.tolist(), scales.tolist(), limits.tolist(), payloads, strict=True)
        return [Sent(*sent) for sent in facts]
