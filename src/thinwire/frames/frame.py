"""A frame as plain values: what `pack` writes and `parse` reads. No torch, no sockets, no codec."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.frames.layout import VERSION, Flags

_ZSTD, _NON_FINITE = int(Flags.ZSTD), int(Flags.NON_FINITE)  # plain integers: an IntFlag costs ten times as much


@dataclass(frozen=True, slots=True)
class Frame:
    """One encoded tensor with its header.

    Args:
        codec: the codec's id, as in `tw.codecs()`.
        dtype: of the tensor that was encoded: `fp32`, `fp16`, `bf16` or `fp64`.
        shape: of the tensor that was encoded; `()` for a 0-d tensor.
        scales: the full-precision scalars that the codec sends beside the payload.
        flags: see `Flags`.
        payload: the codec's bytes: what the papers count.
    """

    codec: str
    dtype: str
    shape: tuple[int, ...]
    scales: tuple[float, ...] = ()
    flags: int = 0
    payload: bytes | memoryview = b""
    version: int = VERSION

    @property
    def size(self) -> int:
        """Number of values in the encoded tensor."""
        return math.prod(self.shape)

    @property
    def non_finite(self) -> bool:
        """True where the sender refused its tensor (NaN or Inf) and asks everyone to skip the step."""
        return self.flags & _NON_FINITE != 0

    @property
    def zstd(self) -> bool:
        """True where the payload went through the zstd stage."""
        return self.flags & _ZSTD != 0

    @property
    def bits_per_value(self) -> float:
        """Payload bits per value: the papers' figure, without header and scales."""
        return 8 * len(self.payload) / self.size if self.size else 0.0
