"""Memory and a stream for the GPU kernels, owned and used again, as `kernels.numba.base243` is for the CPU's.

Kernels run on a stream of their own, so that encoding overlaps what the caller still computes: it waits for the work
that the caller had queued, and the caller's stream waits for it only where `join` says so. Buffers are named, grow
and are never given back; a workspace serves one batch at a time, so their reuse is ordered by its stream.

On the CPU, where Triton's interpreter runs the kernels, there is no stream and nothing to pin.
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
        """Work inside runs on the side stream, after what the caller's stream holds so far."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def follow(self) -> None:
        """The side stream waits for what is queued on the caller's; call outside `running`."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def join(self) -> None:
        """The caller's stream waits for the side stream; the host does not. Call outside `running`."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Work inside runs on the side stream, between what the caller's stream holds and what it gets next."""
        self.follow()
        try:
            with self.running():
                yield
        finally:  # what was queued before an error may still write
            self.join()

    def synchronize(self) -> None:
        """The host waits for everything queued on the side stream."""
        if self._stream is not None:
            self._stream.synchronize()

    def array(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory for `size` values with undefined content; the same for the same name until it must grow."""
        held = self._arrays.get((name, dtype))
        if held is None or held.numel() < size:
            with torch.inference_mode(False):  # else nobody could write it outside of that mode
                held = self._arrays[name, dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return held if held.numel() == size else held[:size]

    def host(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory as `array`, pinned where there is a GPU, so that copies need not be waited for."""
        held = self._hosts.get((name, dtype))
        if held is None or held.numel() < size:
            pinned = self._stream is not None
            with torch.inference_mode(False):
                held = self._hosts[name, dtype] = torch.empty(size, dtype=dtype, device="cpu", pin_memory=pinned)
        return held if held.numel() == size else held[:size]

    def upload(self, name: str, data: NDArray[np.generic]) -> torch.Tensor:
        """Copies a NumPy array to the device without waiting.

        The pinned copy is written again by the next upload of this name: the stream must have finished by then.
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
