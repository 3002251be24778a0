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

from thinwire import frames as framing
from thinwire.codecs import CheckedFrame, Context, encode_all, open_parsed
from thinwire.codecs.decoding import GradientSums, Values
from thinwire.codecs.device import largest as largest_on
from thinwire.codecs.scratch import ScratchPool
from thinwire.codecs.tensors import FloatArray
from thinwire.codecs.ternary_batch import TernaryBatch
from thinwire.codecs.ternary_device import DeviceTernary
from thinwire.errors import FrameError, NonFiniteError
from thinwire.kernels.numba.addresses import Addresses, gather, largest_of_many, scatter
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


class Spans:
    """Some slices of a group's values, which are arrays in the host's memory or tensors on one GPU.

    Args:
        spans: where each slice lies.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._buckets = np.array([span.bucket for span in spans], np.int64)
        self._begins = np.array([span.begin for span in spans], np.int64)
        self._sizes = np.array([span.end - span.begin for span in spans], np.int64)
        self.num_values = int(self._sizes.sum())

    def __len__(self) -> int:
        return len(self._spans)

    def of(self, values: Sequence[Values]) -> list[Values]:
        """Returns the slices as views."""
        return [values[bucket][begin:end] for bucket, begin, end in self._spans]

    def addresses(self, values: Sequence[Values]) -> Addresses | None:
        """Returns where the slices lie in the host's memory; None where they lie elsewhere."""
        return self.places(values) if values and isinstance(values[0], np.ndarray) else None

    def places(self, values: Sequence[Values]) -> Addresses:
        """Returns where the slices lie, in the memory that holds them."""
        begins = [each.ctypes.data if isinstance(each, np.ndarray) else each.data_ptr() for each in values]
        return np.array(begins, np.int64)[self._buckets] + self._begins * values[0].itemsize

    def largest(self, values: Sequence[Values], pool: ScratchPool) -> list[float]:
        """Returns the largest magnitude of each slice, NaN or Inf where one value is."""
        addresses = self.addresses(values)
        if addresses is not None and values[0].itemsize == 4:
            return largest_of_many(addresses, self._sizes)
        if self._spans and isinstance(values[0], torch.Tensor):
            where, dtype = values[0].device, values[0].dtype
            if (found := largest_on(self.places(values), self._sizes, dtype, where, pool)) is not None:
                return found
        maxima = [torch.as_tensor(each, device=each.device).abs().max() for each in self.of(values)]
        return list(torch.stack(maxima).tolist()) if maxima else []  # one wait for all of them

    def gather(self, values: Sequence[Values], dtype: np.dtype[Any]) -> FloatArray:
        """Returns a copy of the slices' values, end to end, on the host."""
        gathered: FloatArray = np.empty(self.num_values, dtype)
        addresses = self.addresses(values)
        if addresses is not None:
            gather(addresses, self._sizes, gathered)
        elif self._spans:
            gathered[:] = (
                torch.cat([torch.as_tensor(each, device=each.device) for each in self.of(values)]).cpu().numpy()
            )
        return gathered

    def scatter(self, whole: FloatArray, values: Sequence[Values]) -> None:
        """Copies values that lie end to end on the host to the slices."""
        addresses = self.addresses(values)
        if addresses is not None:
            scatter(whole, addresses, self._sizes)
            return
        there, at = torch.from_numpy(whole).to(values[0].device), 0
        for out, size in zip(self.of(values), self._sizes.tolist(), strict=True):
            out[:] = there[at : at + size]
            at += size


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
        coded_names: the tensor of every compressed slice.
        plain_sizes: the tensor of every uncompressed slice, and how many of its values lie in it.
    """

    contexts: list[Context]
    coded: Spans
    plain: Spans
    dtype: np.dtype[Any]
    drop_zeros: bool
    coded_names: Sequence[str] = ()
    plain_sizes: Sequence[tuple[str, int]] = ()
    payload_nbytes: int = 0
    """Payload bytes of the frames that were encoded last."""
    num_frames: int = field(init=False)
    """How many frames a packet about this shard holds."""
    num_values: int = field(init=False)
    _batch: TernaryBatch | None = field(init=False)
    _on_device: DeviceTernary | None = field(init=False)
    _sum_plain: FloatArray = field(init=False)
    _present: list[bool] = field(init=False)
    _given: list[int] = field(init=False)
    """How many gradients each slice holds. No view of the values outlives a step: their memory is the caller's."""

    def __post_init__(self) -> None:
        self.num_frames = len(self.coded) + bool(self.plain)
        self.num_values = self.coded.num_values + self.plain.num_values
        self.recode()

    def recode(self) -> None:
        """Takes the contexts' codecs as they are now."""
        together = self.contexts and self.dtype.itemsize == 4
        self._batch = TernaryBatch(self.contexts) if together else None
        on_device = together and not all(context.on_host for context in self.contexts)
        self._on_device = DeviceTernary(self.contexts) if on_device else None

    @property
    def max_nbytes(self) -> int:
        """Most bytes that its frames may have."""
        return self.num_values * self.dtype.itemsize + self.num_frames * _FRAME_SLACK

    # ---- every rank

    def encode(self, values: Sequence[Values]) -> list[bytes]:
        """Returns the frames of this rank's gradient, for the owner. Raises NonFiniteError."""
        present = [True] * len(self.coded)
        if self.drop_zeros and self.contexts:
            present = [magnitude != 0 for magnitude in self._largest(values)]  # NaN is something as well
        return self._encode(values, present, self.plain.gather(values, self.dtype))

    def apply(self, values: Sequence[Values], frames: Sequence[bytes | memoryview]) -> None:
        """Replaces the shard's values by the average that its owner encoded. Raises FrameError."""
        slices = self.coded.of(values)
        plain = self._add(GradientSums(slices), values, frames)  # the first gradient overwrites
        for out, frame in zip(slices, frames, strict=False):
            if not frame:
                out[:] = 0
        self.plain.scatter(plain, values)

    def flush(self, values: Sequence[Values], waiting: set[str], times: float = 1.0) -> None:
        """Adds what was never sent to the values, uncompressed, and so many times.

        Where slices without any gradient are left out, what is added to one of them would be lost: it waits on.

        Args:
            values: of the buckets.
            waiting: names of contexts that are asked; those of which nothing waits any longer are taken out.
            times: what waits is multiplied by it.
        """
        for context, out in zip(self.contexts, self.coded.of(values), strict=True):
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
        self._given = [1] * len(self.coded)
        self._sum_plain = self.plain.gather(values, self.dtype)
        self._check_plain(self._sum_plain)

    def add(self, values: Sequence[Values], frames: Sequence[bytes | memoryview]) -> None:
        """Adds another rank's gradient. Raises FrameError."""
        sums = GradientSums(self.coded.of(values), self._given)
        self._sum_plain += self._add(sums, values, frames)
        self._given = sums.contributions

    def average(self, values: Sequence[Values], over: int) -> None:
        """Turns the sum into the average over so many ranks, in place: 1 leaves the sum.

        What the owner then sends is what it finds in the values: whoever sends something else than the average, such
        as the update that an outer optimizer makes of it, replaces it between this and `encode_average`.
        """
        GradientSums(self.coded.of(values)).average(over)
        if over > 1:
            self._sum_plain *= self.dtype.type(1 / over)
        self.plain.scatter(self._sum_plain, values)
        del self._sum_plain

    def encode_average(self, values: Sequence[Values]) -> list[bytes]:
        """Returns the frames of the average, for everyone. Raises NonFiniteError."""
        given = zip(self._present, self._given, strict=True)
        return self._encode(values, [own or count > 1 for own, count in given], self.plain.gather(values, self.dtype))

    # ---- shared

    def _largest(self, values: Sequence[Values]) -> list[float]:
        return self.coded.largest(values, self.contexts[0].codec.pool) if self.contexts else []

    def _encode(self, values: Sequence[Values], present: Sequence[bool], plain: FloatArray) -> list[bytes]:
        frames, addresses = None, self.coded.addresses(values)
        if self._batch is not None and self._batch.encodes and addresses is not None and all(present):
            frames = self._batch.encode(addresses)
        elif self._on_device is not None and self._on_device.encodes and isinstance(values[0], torch.Tensor):
            frames = self._on_device.encode_on(values[0].device, self.coded.places(values)) if all(present) else None
        if frames is None:
            slices = self.coded.of(values)
            chosen = [(c, each) for c, each, p in zip(self.contexts, slices, present, strict=True) if p]
            encoded = iter(encode_all([context for context, _ in chosen], [each for _, each in chosen]))
            frames = [next(encoded) if p else ABSENT for p in present]
        self.payload_nbytes = sum(c.payload_nbytes for c, p in zip(self.contexts, present, strict=True) if p)
        if self.plain:
            self._check_plain(plain)
            frames.append(join([BatchedTensor(plain)]))
            self.payload_nbytes += plain.nbytes
        return frames

    def _check_plain(self, plain: FloatArray) -> None:
        """Raises NonFiniteError where uncompressed values hold NaN or Inf; it names the first tensor that does."""
        if (finite := np.isfinite(plain)).all():
            return
        at = int(finite.argmin())
        ends = np.cumsum([numel for _, numel in self.plain_sizes])
        names = [name for (name, _), end in zip(self.plain_sizes, ends, strict=True) if end > at]
        raise NonFiniteError(f"{names[0] if names else 'an uncompressed tensor'}: holds NaN or Inf; nothing was sent")

    def _open(self, context: Context, frame: bytes | memoryview) -> CheckedFrame:
        """Checks a slice's frame, before any stage of it is undone. Raises FrameError."""
        parsed, dtype = framing.parse(frame, copy=False), "fp64" if self.dtype.itemsize == 8 else "fp32"
        if (parsed.shape, parsed.dtype) != (context.shape, dtype):
            raise FrameError(
                f"{context.name} has shape {context.shape} and dtype {dtype}; shape {parsed.shape} "
                f"and dtype {parsed.dtype} came"
            )
        return open_parsed(parsed)

    def _add(self, sums: GradientSums, values: Sequence[Values], frames: Sequence[bytes | memoryview]) -> FloatArray:
        """Adds a packet's compressed slices to their sums; returns its uncompressed values. Raises FrameError."""
        coded, addresses = frames[: len(self.coded)], self.coded.addresses(values)
        done = [0] * len(coded)
        adds = np.array(sums.contributions) > 0
        if self._batch is not None and addresses is not None:
            done = self._batch.decode(coded, addresses, adds)
        elif self._on_device is not None and isinstance(values[0], torch.Tensor):
            done = self._on_device.decode_on(values[0].device, coded, self.coded.places(values), adds)
        if any(done):
            sums.contributions = [count + (nbytes > 0) for count, nbytes in zip(sums.contributions, done, strict=True)]
        if not all(done):
            sums.add(
                [
                    self._open(context, frame) if len(frame) and not d else None
                    for context, frame, d in zip(self.contexts, coded, done, strict=True)
                ]
            )
        if not self.plain:
            return np.zeros(0, self.dtype)
        return split(frames[-1], [self.plain.num_values], self.dtype)[0].values
