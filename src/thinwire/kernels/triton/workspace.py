"""Reused memory and a stream for the GPU kernels; the CPU's counterpart is in `kernels.numba.base243`.

Kernels run on a side stream, so that encoding overlaps the caller's computation. The side stream waits for the work
that the caller had queued; the caller's stream waits for it only in `join`. Buffers are named, grow and are never
freed; a workspace serves one batch at a time, so its stream orders their reuse.

On the CPU, where Triton's interpreter runs the kernels, a workspace has no stream and no pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class DeviceWorkspace:
    """Buffers on one device, pinned buffers on the host, and a side stream.

    Example:
        >>> workspace = DeviceWorkspace(torch.device("cpu"))
        >>> with workspace.running():
        ...     codes = workspace.array("codes", 100, torch.uint8)
        >>> codes.shape
        torch.Size([100])
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._arrays: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._hosts: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def running(self) -> AbstractContextManager[None]:
        """Work inside runs on the side stream, after the work already queued on the caller's stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def follow(self) -> None:
        """Makes the side stream wait for the work queued on the caller's. Call outside `running`."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def join(self) -> None:
        """Makes the caller's stream wait for the side stream; the host does not wait. Call outside `running`."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Work inside runs on the side stream, after the work queued on the caller's stream and before later work."""
        self.follow()
        try:
            with self.running():
                yield
        finally:  # work that was queued before an error may still write
            self.join()

    def synchronize(self) -> None:
        """Makes the host wait for all work queued on the side stream."""
        if self._stream is not None:
            self._stream.synchronize()

    def array(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns device memory for `size` undefined values; the same for the same name until it must grow."""
        held = self._arrays.get((name, dtype))
        if held is None or held.numel() < size:
            with torch.inference_mode(False):  # an inference tensor cannot be written outside of that mode
                held = self._arrays[name, dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return held if held.numel() == size else held[:size]

    def host(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns host memory as `array`, pinned for a GPU, so that copies are asynchronous."""
        held = self._hosts.get((name, dtype))
        if held is None or held.numel() < size:
            pinned = self._stream is not None
            with torch.inference_mode(False):
                held = self._hosts[name, dtype] = torch.empty(size, dtype=dtype, device="cpu", pin_memory=pinned)
        return held if held.numel() == size else held[:size]

    def upload(self, name: str, data: NDArray[np.generic]) -> torch.Tensor:
        """Copies a NumPy array to the device without waiting.

        The next upload of this name overwrites the pinned copy: the stream must have finished by then.
        """
        return self.upload_all(name, [data.reshape(-1)])

    def upload_all(self, name: str, pieces: Sequence[NDArray[np.generic]]) -> torch.Tensor:
        """As `upload`, of flat arrays of one type, end to end."""
        dtype, size = _torch_type(pieces[0].dtype), sum(piece.size for piece in pieces)
        staged, uploaded = self.host(name, size, dtype), self.array(name, size, dtype)
        np.concatenate(pieces, out=staged.numpy())
        uploaded.copy_(staged, non_blocking=True)
        return uploaded


@cache
def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
