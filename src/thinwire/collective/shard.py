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
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.codecs import Context
from thinwire.codecs.decoding import Values
from thinwire.codecs.flats import Flats, address_of, average
from thinwire.codecs.tensor_set import TensorSet
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import NonFiniteError
from thinwire.packets import BatchedTensor
from thinwire.packets.batch import join, split

ABSENT = b""
"""The frame of a slice that took no part in this step on this rank."""

_FRAME_SLACK = 1024
"""More than a frame's head, scales and length can add to values that do not shrink at all, in bytes."""


class Span(NamedTuple):
    """Where a slice of a tensor lies: the bucket's place in a group, and its first and last value's end there."""

    name: str
    bucket: int
    begin: int
    end: int


class Spans:
    """Some slices of a group's values, which are arrays in the host's memory or tensors on one GPU.

    Args:
        spans: where each slice lies.

    Attributes:
        names: of the slices' tensors.
        sizes: how many values each slice has.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._buckets = np.array([span.bucket for span in spans], np.int64)
        self._begins = np.array([span.begin for span in spans], np.int64)
        self.names = [span.name for span in spans]
        self.sizes = np.array([span.end - span.begin for span in spans], np.int64)
        self.num_values = int(self.sizes.sum())

    def __len__(self) -> int:
        return len(self._spans)

    def of(self, values: Sequence[Values]) -> Flats:
        """Returns the slices of the buckets' values."""
        begins = np.array([address_of(each) for each in values], np.int64)[self._buckets]
        places = begins + self._begins * values[0].itemsize
        return Flats(
            places, self.sizes, values[0], lambda: [values[bucket][begin:end] for _, bucket, begin, end in self._spans]
        )


@dataclass(slots=True)
class Shard:
    """What one rank owns of a bucket group.

    `encode`, `apply` are for every rank; `begin`, `add`, `average`, `encode_average` for its owner, in this order.

    Args:
        contexts: of the compressed slices.
        coded: where each of them lies.
        plain: where the uncompressed slices lie; their values travel together, in one last frame.
        dtype: of the values, float32 or float64.
        drop_zeros: whether a slice without any gradient is left out, as DDP leaves out unused parameters.
    """

    contexts: list[Context]
    coded: Spans
    plain: Spans
    dtype: np.dtype[Any]
    drop_zeros: bool
    payload_nbytes: int = 0
    """Payload bytes of the frames that were encoded last."""
    num_frames: int = field(init=False)
    """How many frames a packet about this shard holds."""
    num_values: int = field(init=False)
    _set: TensorSet = field(init=False)
    _sum_plain: FloatArray = field(init=False)
    _present: list[bool] = field(init=False)
    _given: NDArray[np.int64] = field(init=False)
    """How many gradients each slice holds. No view of the values outlives a step: their memory is the caller's."""

    def __post_init__(self) -> None:
        self.num_frames = len(self.coded) + bool(self.plain)
        self.num_values = self.coded.num_values + self.plain.num_values
        self.recode()

    def recode(self) -> None:
        """Reads the contexts' codecs anew."""
        self._set = TensorSet(self.contexts)

    @property
    def max_nbytes(self) -> int:
        """Most bytes that its frames may have."""
        return self.num_values * self.dtype.itemsize + self.num_frames * _FRAME_SLACK

    # ---- every rank

    def encode(self, values: Sequence[Values]) -> list[bytes]:
        """Returns the frames of this rank's gradient, for the owner. Raises NonFiniteError."""
        present = [True] * len(self.coded)
        if self.drop_zeros:
            present = [magnitude != 0 for magnitude in self._largest(values)]  # NaN is something as well
        return self._encode(values, present)

    def apply(self, values: Sequence[Values], frames: Sequence[bytes | memoryview]) -> None:
        """Replaces the shard's values by the average that its owner encoded. Raises FrameError."""
        coded, slices = frames[: len(self.coded)], self.coded.of(values)
        self._set.store(coded, slices)
        if not all(map(len, coded)):
            for out, frame in zip(slices.views(), coded, strict=True):
                if not len(frame):
                    out[:] = 0
        self.plain.of(values).scatter(self._plain_of(frames))

    def flush(self, values: Sequence[Values], waiting: set[str], times: float = 1.0) -> None:
        """Adds residuals to the values, uncompressed, and sets them to zero.

        A slice that is left out for lack of a gradient keeps its residual: it would be lost.

        Args:
            values: of the buckets.
            waiting: names of contexts to flush; those flushed are removed.
            times: multiplies the residuals.
        """
        for context, out in zip(self.contexts, self.coded.of(values).views(), strict=True):
            residual = context.residual
            if residual is None or context.name not in waiting:
                continue
            if self.drop_zeros and not out.any() and residual.any():
                continue
            waiting.remove(context.name)
            more = residual if times == 1 else residual * times
            out += more.to(out.device) if isinstance(out, torch.Tensor) else more.cpu().numpy()
            residual.zero_()

    # ---- its owner

    def begin(self, values: Sequence[Values]) -> None:
        """Starts the sum with this rank's own gradient, in place. Raises NonFiniteError."""
        largest = self._largest(values)
        for context, magnitude in zip(self.contexts, largest, strict=True):
            if not np.isfinite(magnitude):
                raise NonFiniteError(f"{context.name}: holds NaN or Inf; nothing was sent")
        self._present = [magnitude > 0 or not self.drop_zeros for magnitude in largest]
        self._given = np.ones(len(self.coded), np.int64)
        self._sum_plain = self.plain.of(values).gather()
        self._check_plain(self._sum_plain)

    def add(self, values: Sequence[Values], frames: Sequence[bytes | memoryview]) -> None:
        """Adds another rank's gradient. Raises FrameError."""
        self._set.add(frames[: len(self.coded)], self.coded.of(values), self._given)
        self._sum_plain += self._plain_of(frames)

    def average(self, values: Sequence[Values], over: int) -> None:
        """Turns the sum into the average over so many ranks, in place: 1 leaves the sum.

        `encode_average` encodes the values that it finds. A caller that sends something else, such as an outer
        optimizer's update, replaces the average between the two calls.
        """
        for total in (*self.coded.of(values).views(), self._sum_plain):
            average(total, over)
        self.plain.of(values).scatter(self._sum_plain)
        del self._sum_plain

    def encode_average(self, values: Sequence[Values]) -> list[bytes]:
        """Returns the frames of the average, for everyone. Raises NonFiniteError."""
        given = zip(self._present, (self._given > 1).tolist(), strict=True)
        return self._encode(values, [own or more for own, more in given])

    # ---- shared

    def _largest(self, values: Sequence[Values]) -> list[float]:
        return self.coded.of(values).largest() if self.contexts else []

    def _encode(self, values: Sequence[Values], present: Sequence[bool]) -> list[bytes]:
        slices = self.coded.of(values)
        if all(present):
            frames = cast("list[bytes]", self._set.encode(slices))
        else:
            places = [place for place, is_present in enumerate(present) if is_present]
            some = TensorSet([self.contexts[place] for place in places]).encode(slices.at(places))
            frames = [ABSENT] * len(present)
            for place, frame in zip(places, cast("list[bytes]", some), strict=True):
                frames[place] = frame
        self.payload_nbytes = sum(c.payload_nbytes for c, p in zip(self.contexts, present, strict=True) if p)
        if self.plain:
            plain = self.plain.of(values).gather()
            self._check_plain(plain)
            frames.append(join([BatchedTensor(plain)]))
            self.payload_nbytes += plain.nbytes
        return frames

    def _check_plain(self, plain: FloatArray) -> None:
        """Raises NonFiniteError where uncompressed values hold NaN or Inf; it names the first tensor that does."""
        if (finite := np.isfinite(plain)).all():
            return
        place = int(np.searchsorted(np.cumsum(self.plain.sizes), finite.argmin(), side="right"))
        raise NonFiniteError(f"{self.plain.names[place]}: holds NaN or Inf; nothing was sent")

    def _plain_of(self, frames: Sequence[bytes | memoryview]) -> FloatArray:
        """Returns the uncompressed values of a packet. Raises FrameError."""
        if not self.plain:
            return np.zeros(0, self.dtype)
        return split(frames[-1], [self.plain.num_values], self.dtype)[0].values
