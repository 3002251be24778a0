"""The arithmetic of one rank's shard of a bucket group, in double-pass error compensation.

Every rank is the server of its own shard (DoubleSqueeze, algorithm 1, in all-reduce form):

    push   others → owner    c_i = C(g_i + r_i),  r_i ← g_i + r_i − c_i
           owner             v = (g_own + Σ c_i)/N
    pull   owner → everyone  c = C(v + δ),  δ ← v + δ − c;  g ← c, on the owner too: all ranks hold the same bits

All of it happens in place, on the buckets' flat values: NumPy arrays in the host's memory, or tensors where they lie on
a GPU, and then only frames and uncompressed values cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from thinwire.codecs import CheckedFrame, Context, encode_all, open_frame
from thinwire.codecs.sums import GradientSums, Values
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import FrameError, NonFiniteError
from thinwire.kernels.numba import max_magnitude
from thinwire.packets import BatchedTensor
from thinwire.packets.batch import join, split

ABSENT = b""
"""The frame of a slice that took no part in this step on this rank."""

_FRAME_SLACK = 1024
"""More than a frame's head, scales and length can add to values that do not shrink at all, in bytes."""


class Span(NamedTuple):
    """Where a slice lies in a group: the bucket's place, and the first and the last value's end in its flat values."""

    bucket: int
    begin: int
    end: int

    def of(self, values: Sequence[Values]) -> Values:
        """Returns the slice as a view."""
        return values[self.bucket][self.begin : self.end]


@dataclass(slots=True)
class Shard:
    """What one rank owns of a bucket group.

    `encode`, `apply` are for every rank; `begin`, `add`, `average`, `encode_average` for its owner, in this order.

    Args:
        contexts: of the compressed slices.
        spans: where each of them lies.
        plain: where the uncompressed slices lie; their values travel together, in one last frame.
        dtype: of the values, float32 or float64.
        drop_zeros: whether a slice without any gradient is left out, as DDP leaves out unused parameters.
    """

    contexts: list[Context]
    spans: list[Span]
    plain: list[Span]
    dtype: np.dtype[Any]
    drop_zeros: bool
    payload_nbytes: int = 0
    """Payload bytes of the frames that were encoded last."""
    num_frames: int = field(init=False)
    """How many frames a packet about this shard holds."""
    num_values: int = field(init=False)
    _num_plain: int = field(init=False)
    _sum: GradientSums = field(init=False)
    _sum_plain: GradientSums = field(init=False)
    _present: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self._num_plain = sum(span.end - span.begin for span in self.plain)
        self.num_frames = len(self.spans) + bool(self.plain)
        self.num_values = sum(span.end - span.begin for span in self.spans) + self._num_plain

    @property
    def max_nbytes(self) -> int:
        """Most bytes that its frames may have."""
        return self.num_values * self.dtype.itemsize + self.num_frames * _FRAME_SLACK

    # ---- every rank

    def encode(self, values: Sequence[Values]) -> list[bytes]:
        """Returns the frames of this rank's gradient, for the owner. Raises NonFiniteError."""
        slices = [span.of(values) for span in self.spans]
        present = [bool(each.any()) for each in slices] if self.drop_zeros else [True] * len(slices)
        return self._encode(slices, present, self._gather(values))

    def apply(self, values: Sequence[Values], frames: Sequence[bytes | memoryview]) -> None:
        """Replaces the shard's values by the average that its owner encoded. Raises FrameError."""
        opened, plain = self._open(frames)
        slices = [span.of(values) for span in self.spans]
        GradientSums(slices).add(opened)  # the first gradient overwrites
        for out, frame in zip(slices, opened, strict=True):
            if frame is None:
                out[:] = 0
        if plain is not None:
            self._scatter(plain.values, values)

    def flush(self, values: Sequence[Values]) -> None:
        """Adds what was never sent, uncompressed: where there is only one rank."""
        for context, span in zip(self.contexts, self.spans, strict=True):
            residual = context.residual
            if residual is not None:
                out = span.of(values)
                out += residual.to(out.device) if isinstance(out, torch.Tensor) else residual.cpu().numpy()
                residual.zero_()

    # ---- its owner

    def begin(self, values: Sequence[Values]) -> None:
        """Starts the sum with this rank's own gradient, in place. Raises NonFiniteError."""
        slices = [span.of(values) for span in self.spans]
        largest = _largest(slices)
        for context, magnitude in zip(self.contexts, largest, strict=True):
            if not np.isfinite(magnitude):
                raise NonFiniteError(f"{context.name}: holds NaN or Inf; nothing was sent")
        self._present = [magnitude > 0 or not self.drop_zeros for magnitude in largest]
        self._sum = GradientSums(slices, contributions=1)
        self._sum_plain = GradientSums([self._gather(values)], contributions=1)
        if not np.isfinite(self._sum_plain.sums[0]).all():
            raise NonFiniteError("an uncompressed tensor holds NaN or Inf; nothing was sent")

    def add(self, frames: Sequence[bytes | memoryview]) -> None:
        """Adds another rank's gradient. Raises FrameError."""
        opened, plain = self._open(frames)
        self._sum.add(opened)
        self._sum_plain.add([plain])

    def average(self, values: Sequence[Values], over: int) -> None:
        """Turns the sum into the average over so many ranks, in place: 1 leaves the sum."""
        self._sum.average(over)
        self._sum_plain.average(over)
        self._scatter(self._sum_plain.sums[0], values)

    def encode_average(self, values: Sequence[Values]) -> list[bytes]:
        """Returns the frames of the average, for everyone. Raises NonFiniteError."""
        given = zip(self._present, self._sum.contributions, strict=True)
        present = [own or contributions > 1 for own, contributions in given]
        return self._encode(self._sum.sums, present, self._gather(values))

    # ---- shared

    def _encode(self, slices: Sequence[Values], present: Sequence[bool], plain: FloatArray) -> list[bytes]:
        chosen = [(c, each) for c, each, p in zip(self.contexts, slices, present, strict=True) if p]
        encoded = iter(encode_all([context for context, _ in chosen], [each for _, each in chosen]))
        frames = [next(encoded) if p else ABSENT for p in present]
        self.payload_nbytes = sum(context.payload_nbytes for context, _ in chosen)
        if self.plain:
            frames.append(join([BatchedTensor.of(plain, "an uncompressed tensor")]))
            self.payload_nbytes += plain.nbytes
        return frames

    def _open(self, frames: Sequence[bytes | memoryview]) -> tuple[list[CheckedFrame | None], BatchedTensor | None]:
        """Checks a packet's frames. Raises FrameError."""
        opened = [open_frame(frame) if len(frame) else None for frame in frames[: len(self.spans)]]
        dtype = "fp64" if self.dtype.itemsize == 8 else "fp32"
        for context, span, one in zip(self.contexts, self.spans, opened, strict=True):
            if one is not None and (one.frame.shape, one.frame.dtype) != ((span.end - span.begin,), dtype):
                raise FrameError(
                    f"{context.name} has shape {(span.end - span.begin,)} and dtype {dtype}; shape {one.frame.shape} "
                    f"and dtype {one.frame.dtype} came"
                )
        return opened, split(frames[-1], [self._num_plain], self.dtype)[0] if self.plain else None

    def _gather(self, values: Sequence[Values]) -> FloatArray:
        """A copy of the uncompressed slices' values, end to end, on the host."""
        if not self.plain:
            return np.zeros(0, self.dtype)
        slices = [span.of(values) for span in self.plain]
        tensors = [each for each in slices if isinstance(each, torch.Tensor)]
        gathered: FloatArray
        if tensors:
            gathered = torch.cat(tensors).cpu().numpy()
        else:
            gathered = np.concatenate([each for each in slices if isinstance(each, np.ndarray)])
        return gathered

    def _scatter(self, plain: Any, values: Sequence[Values]) -> None:
        at = 0
        for span in self.plain:
            out = span.of(values)
            if at == 0 and isinstance(out, torch.Tensor):
                plain = torch.from_numpy(plain).to(out.device)
            out[:] = plain[at : at + span.end - span.begin]
            at += span.end - span.begin


def _largest(slices: Sequence[Values]) -> list[float]:
    """The largest magnitude of each slice, NaN or Inf where one value is."""
    maxima = [each.abs().max() for each in slices if isinstance(each, torch.Tensor)]
    if maxima:
        found: list[float] = torch.stack(maxima).tolist()  # one wait for all of them
        return found
    return [float(max_magnitude(each)) for each in slices if isinstance(each, np.ndarray)]
