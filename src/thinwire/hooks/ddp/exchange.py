"""The arithmetic of one bucket, in double-pass error compensation (DoubleSqueeze, algorithm 1, all-reduce form).

Every rank is the server of its own share of the bucket:

    others → owner    c_i = C(g_i + r_i),  r_i ← g_i + r_i − c_i
    owner             v = (g_own + Σ c_i)/N + δ,  c = C(v),  δ ← v − c
    owner → everyone  g ← c, on the owner too, so that all ranks hold the same bits

All of it happens in place, on the bucket's flat values: a NumPy array in the host's memory, or a tensor where they lie
on a GPU, and then only frames and uncompressed values cross. No thread, no socket: a test can play every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from thinwire.codecs import Context, decode, encode_all
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import NonFiniteError
from thinwire.hooks.ddp.message import HEAD_NBYTES, TEXT_NBYTES
from thinwire.hooks.ddp.residuals import Residuals
from thinwire.kernels.numba import max_magnitude
from thinwire.policies.compression import PLAIN

Values: TypeAlias = FloatArray | torch.Tensor
"""A bucket's values, flat: an array on the host, a tensor on a GPU."""

ABSENT = b""
"""The frame of a slice that took no part in this step on this rank."""

_FRAME_SLACK = 1024
"""More than a frame's head, scales and length can add to values that do not shrink at all."""


@dataclass(slots=True)
class Share:
    """What one rank owns of a bucket.

    Args:
        contexts: of the compressed slices.
        spans: where each of them lies in the bucket's values, as (begin, end).
        plain: where the uncompressed values lie; they travel together, in one last frame.
        dtype: of the bucket's values.
        drop_zeros: whether a slice without any gradient is left out, as DDP leaves out unused parameters.
    """

    contexts: list[Context]
    spans: list[tuple[int, int]]
    plain: list[tuple[int, int]]
    dtype: np.dtype[Any]
    drop_zeros: bool
    payload_nbytes: int = 0
    """Payload bytes of the frames that were encoded last."""
    _loose: FloatArray = field(init=False)
    _given: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self._loose = np.zeros(sum(end - begin for begin, end in self.plain), self.dtype)
        self._given = [False] * len(self.spans)

    @property
    def num_frames(self) -> int:
        """How many frames a message about this share holds."""
        return len(self.spans) + bool(self.plain)

    @property
    def numel(self) -> int:
        """How many values it has."""
        return sum(end - begin for begin, end in self.spans) + self._loose.size

    @property
    def max_nbytes(self) -> int:
        """Most bytes that a message about this share may have."""
        return HEAD_NBYTES + TEXT_NBYTES + self.numel * self.dtype.itemsize + self.num_frames * _FRAME_SLACK

    def encode(self, values: Values) -> list[bytes]:
        """Encodes this rank's gradient for the owner. Raises NonFiniteError."""
        return self._encode(values, [not self.drop_zeros or bool(values[b:e].any()) for b, e in self.spans])

    def begin(self, values: Values) -> None:
        """As owner: starts the sum with this rank's own gradient, in place. Raises NonFiniteError."""
        for index, largest in enumerate(_largest(values, self.spans)):
            if not np.isfinite(largest):
                raise NonFiniteError(f"{self.contexts[index].name}: holds NaN or Inf; nothing was sent")
            self._given[index] = not self.drop_zeros or largest > 0
        self._gather(values)
        if not np.isfinite(self._loose).all():
            raise NonFiniteError("an uncompressed tensor holds NaN or Inf; nothing was sent")

    def add(self, values: Values, frames: Sequence[memoryview]) -> None:
        """As owner: adds another rank's gradient. Raises FrameError."""
        for index, (begin, end) in enumerate(self.spans):
            if len(frames[index]):
                self._given[index] = True
                decode(frames[index], out=values[begin:end], accumulate=True)
        if self.plain:
            decode(frames[-1], out=self._loose, accumulate=True)

    def finish(self, values: Values, scale: float) -> list[bytes]:
        """As owner: turns the sum into the average and encodes it for everyone. Raises NonFiniteError."""
        factor = self.dtype.type(scale)
        for begin, end in self.spans:
            values[begin:end] *= factor
        self._loose *= factor
        self._scatter(values)
        return self._encode(values, self._given)

    def apply(self, values: Values, frames: Sequence[bytes | memoryview]) -> None:
        """Replaces this share's values by what its owner sent. Raises FrameError."""
        for frame, (begin, end) in zip(frames, self.spans, strict=False):
            if len(frame):
                decode(frame, out=values[begin:end], accumulate=False)
            else:
                values[begin:end] = 0
        if self.plain:
            decode(frames[-1], out=self._loose, accumulate=False)
            self._scatter(values)

    def flush(self, values: FloatArray) -> None:
        """Where there is only one rank: adds what was never sent, uncompressed."""
        for context, (begin, end) in zip(self.contexts, self.spans, strict=True):
            if context.residual is not None:
                values[begin:end] += context.residual.cpu().numpy()
                context.residual.zero_()

    def _encode(self, values: Values, given: Sequence[bool]) -> list[bytes]:
        self.payload_nbytes = self._loose.nbytes
        chosen = [(c, values[b:e]) for c, (b, e), p in zip(self.contexts, self.spans, given, strict=True) if p]
        encoded = iter(encode_all([context for context, _ in chosen], [part for _, part in chosen]))
        frames = [next(encoded) if present else ABSENT for present in given]
        self.payload_nbytes += sum(context.payload_nbytes for context, _ in chosen)
        if self.plain:
            self._gather(values)
            try:
                frames.append(PLAIN.encode(self._loose))
            except NonFiniteError as error:
                raise NonFiniteError(f"an uncompressed tensor {str(error).partition(': ')[2]}") from None
        return frames

    def _gather(self, values: Values) -> None:
        if not isinstance(values, torch.Tensor):
            at = 0
            for begin, end in self.plain:
                self._loose[at : at + end - begin] = values[begin:end]
                at += end - begin
        elif self.plain:
            self._loose[:] = torch.cat([values[begin:end] for begin, end in self.plain]).cpu().numpy()

    def _scatter(self, values: Values) -> None:
        loose: Any = (
            torch.from_numpy(self._loose).to(values.device) if isinstance(values, torch.Tensor) else self._loose
        )
        at = 0
        for begin, end in self.plain:
            values[begin:end] = loose[at : at + end - begin]
            at += end - begin


def _largest(values: Values, spans: Sequence[tuple[int, int]]) -> list[float]:
    """The largest magnitude of each span, NaN or Inf where one value is."""
    if not isinstance(values, torch.Tensor):
        return [float(max_magnitude(values[begin:end])) for begin, end in spans]
    if not spans:
        return []
    found: list[float] = torch.stack([values[begin:end].abs().max() for begin, end in spans]).tolist()
    return found


def shares(residuals: Residuals, offsets: Sequence[tuple[str, int]], *, drop_zeros: bool) -> tuple[Share, ...]:
    """Returns each rank's share of a bucket.

    Args:
        residuals: this rank's contexts.
        offsets: the bucket's parameters, and where each begins in its flat values.
        drop_zeros: see `Share`.
    """
    wide = any(residuals.trained[name].wide is torch.float64 for name, _ in offsets)
    coded: list[list[tuple[Context, tuple[int, int]]]] = [[] for _ in range(residuals.world)]
    plain: list[list[tuple[int, int]]] = [[] for _ in range(residuals.world)]
    for name, offset in offsets:
        for piece in residuals.slices[name]:
            span = (offset + piece.start, offset + piece.stop)
            if piece in residuals.contexts:
                coded[piece.owner].append((residuals.contexts[piece], span))
            else:
                plain[piece.owner].append(span)
    return tuple(
        Share(
            contexts=[context for context, _ in coded[owner]],
            spans=[span for _, span in coded[owner]],
            plain=plain[owner],
            dtype=np.dtype(np.float64 if wide else np.float32),
            drop_zeros=drop_zeros,
        )
        for owner in range(residuals.world)
    )
