"""One rank's shard of a bucket group, in double-pass error compensation: frames to and from its owner.

Every rank is the server of its own shard (DoubleSqueeze, algorithm 1, in all-reduce form):

    push   other ranks → owner   c_i = C(g_i + r_i),  r_i ← g_i + r_i − c_i
           owner                 v = (g_own + Σ c_i)/N
    pull   owner → all ranks     c = C(v + δ),  δ ← v + δ − c;  g ← c, on the owner too: all ranks hold the same bits

`OwnedShard` makes the mean v. All steps work in place, on the buckets' flat values: NumPy arrays in the host's memory,
or tensors on a GPU, from which only frames and uncompressed values are copied to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs import Context
from thinwire.codecs.decoding import Values
from thinwire.codecs.flats import Flats, address_of
from thinwire.codecs.tensor_set import Checked, TensorSet
from thinwire.errors import FrameError, NonFiniteError
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.packets.batch import join, split
from thinwire.policies.compression import PLAIN

ABSENT = b""
"""The frame of a slice without a gradient in this step on this rank."""

_FRAME_SLACK = 1024
"""More than a frame's head, scales and length add to values that do not shrink, in bytes."""


class Span(NamedTuple):
    """The place of a tensor's slice: the bucket's place in a group, and the slice's start and end in that bucket."""

    name: str
    bucket: int
    begin: int
    end: int


class Spans:
    """Slices of a group's values, which are arrays in the host's memory or tensors on one GPU.

    Args:
        spans: of the slices.

    Attributes:
        names: of the slices' tensors.
        sizes: number of values of each slice.
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
    """One rank's slices of a bucket group.

    Args:
        contexts: of the compressed slices.
        coded: the compressed slices.
        plain: the uncompressed slices; their values are sent end to end, as one tensor in one last frame.
        dtype: of the values, float32 or float64.
        drop_zeros: whether a compressed slice without a gradient is left out, as DDP leaves out unused parameters.
        own: by place, the contexts of the owner's own gradient, for slices that are averaged over senders.
    """

    contexts: list[Context]
    coded: Spans
    plain: Spans
    dtype: np.dtype[Any]
    drop_zeros: bool
    own: Mapping[int, Context] = field(default_factory=dict)
    payload_nbytes: int = 0
    """Payload bytes of the last encoded frames."""
    num_frames: int = field(init=False)
    """Number of frames in a packet about this shard."""
    num_values: int = field(init=False)
    tensors: TensorSet = field(init=False)
    _own: TensorSet = field(init=False)

    def __post_init__(self) -> None:
        self.num_frames = len(self.coded) + bool(self.plain)
        self.num_values = self.coded.num_values + self.plain.num_values
        self.recode()

    def recode(self) -> None:
        """Reads the contexts' codecs again."""
        whole = [PLAIN.context(np.empty(self.plain.num_values, self.dtype), name="uncompressed")] if self.plain else []
        self.tensors = TensorSet([*self.contexts, *whole], range(len(self.coded), self.num_frames))
        self._own = TensorSet([*self.own.values()])

    @property
    def max_nbytes(self) -> int:
        """The most bytes of its frames."""
        return self.num_values * self.dtype.itemsize + self.num_frames * _FRAME_SLACK

    # ---- the values of its tensors

    def slices(self, values: Sequence[Values]) -> Flats:
        """Returns the compressed slices of the buckets' values, and a copy of the uncompressed ones, end to end."""
        coded = self.coded.of(values)
        return coded.followed_by(self.plain.of(values).joined()) if self.plain else coded

    def put_back(self, slices: Flats, values: Sequence[Values]) -> None:
        """Stores the copy of the uncompressed values in the buckets."""
        if self.plain:
            self.plain.of(values).scatter(slices.at([len(self.coded)]).gather())

    def present(self, slices: Flats) -> list[bool]:
        """Returns which slices to send: all, or with `drop_zeros` those with a gradient."""
        if not self.drop_zeros:
            return [True] * self.num_frames
        return self._present(slices.largest())  # NaN counts as a gradient

    def present_finite(self, slices: Flats) -> NDArray[np.int64]:
        """Returns 1 for each slice that is present, else 0. Raises NonFiniteError for NaN and Inf."""
        largest = slices.largest()
        for context, magnitude in zip(self.contexts, largest, strict=False):
            if not np.isfinite(magnitude):
                raise NonFiniteError(f"{context.name}: holds NaN or Inf; nothing was sent")
        self._check_plain(slices)
        return np.array(self._present(largest), np.int64)

    def _present(self, largest: Sequence[float]) -> list[bool]:
        return [m != 0 or not self.drop_zeros or place == len(self.coded) for place, m in enumerate(largest)]

    def _check_plain(self, slices: Flats) -> None:
        """Raises NonFiniteError for NaN or Inf in uncompressed values; it names the first such tensor."""
        plain = slices.at([len(self.coded)]).gather() if self.plain else np.empty(0)
        if not (finite := np.isfinite(plain)).all():
            place = int(np.searchsorted(np.cumsum(self.plain.sizes), finite.argmin(), side="right"))
            raise NonFiniteError(f"{self.plain.names[place]}: holds NaN or Inf; nothing was sent")

    # ---- its packets

    def encode(self, slices: Flats, present: Sequence[bool]) -> list[bytes]:
        """Returns the frames of the slices that are present. Raises NonFiniteError."""
        self._check_plain(slices)
        places = [place for place, is_present in enumerate(present) if is_present]
        some = self.tensors.at(places)
        frames = [ABSENT] * len(present)
        for place, made in zip(places, some.encode(slices.at(places)), strict=True):
            frames[place] = join([made]) if isinstance(made, BatchedTensor) else bytes(made)
        self.payload_nbytes = sum(context.payload_nbytes for context in some.contexts)
        return frames

    def opened(self, frames: Sequence[bytes | memoryview]) -> list[EncodedTensor]:
        """Returns each slice's encoded tensor in a packet. Raises FrameError."""
        return (
            [*frames[: len(self.coded)], *split(frames[-1], [self.plain.num_values], self.dtype)]
            if self.plain
            else list(frames)
        )

    def encode_own(self, slices: Flats) -> dict[int, Checked]:
        """Encodes the owner's own gradient of the slices that are averaged over senders. Raises NonFiniteError."""
        if not self.own:
            return {}
        frames = self._own.encode(slices.at([*self.own]))
        return dict(zip(self.own, self._own.check(frames), strict=True))

    def checked(self, frames: Sequence[bytes | memoryview]) -> list[Checked]:
        """Returns each slice's encoded tensor in another rank's packet, to be added. Raises FrameError."""
        opened = self.opened(frames)
        if not self.own:
            return [*opened]  # adding checks them
        checked = self.tensors.check(opened)
        for context, frame, each in zip(self.contexts, frames, checked, strict=False):
            if each is None and len(frame):
                raise FrameError(f"{context.name}: the sender's tensor held NaN or Inf")
        return checked

    def apply(self, values: Sequence[Values], frames: Sequence[bytes | memoryview]) -> None:
        """Replaces the shard's values by the average that its owner encoded. Raises FrameError."""
        coded = self.opened(frames)
        if self.plain and isinstance(vector := coded.pop(), BatchedTensor):
            self.plain.of(values).scatter(vector.values)
        slices = self.coded.of(values)
        self.tensors.at(range(len(coded))).store(coded, slices)
        if not all(map(len, frames)):
            for out, frame in zip(slices.views(), frames, strict=False):
                if not len(frame):
                    out[:] = 0

    def flush(self, values: Sequence[Values], waiting: set[str], times: float = 1.0) -> None:
        """Adds residuals to the values, uncompressed, and sets them to zero.

        A slice that is left out because it has no gradient keeps its residual, which would be lost.

        Args:
            values: of the buckets.
            waiting: names of contexts to flush; flushed ones are removed.
            times: factor on the residuals.
        """
        for context, out in zip(self.contexts, self.coded.of(values).tensors(), strict=True):
            residual = context.residual
            if residual is None or context.name not in waiting:
                continue
            if self.drop_zeros and not out.any() and residual.any():
                continue
            waiting.remove(context.name)
            out += (residual if times == 1 else residual * times).view(-1).to(out.device)
            residual.zero_()
