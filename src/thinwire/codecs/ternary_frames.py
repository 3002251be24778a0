"""Frames of many 3LC tensors in the host's memory, by one kernel call each way.

A small tensor's arithmetic takes a microsecond or two; the calls around it take twenty. Frames, residuals and sums are
the same bits either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire import frames
from thinwire.codecs.base import Codec
from thinwire.codecs.lag import LagBound
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.threelc import TRITS_PER_BYTE, ZERO_RUN, ThreeLC
from thinwire.codecs.zstd_frames import ZstdFrames
from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.addresses import Addresses
from thinwire.kernels.numba.decode_many import decode_many
from thinwire.kernels.numba.jit import frozen
from thinwire.kernels.numba.lag import set_multipliers
from thinwire.kernels.numba.many import encode_many, scales_of_many


def takes_codec(codec: Codec) -> bool:
    """Whether a batch encodes as this codec does: it is 3LC, with default options but for sparsity, clip and zstd."""
    return isinstance(codec.scheme, ThreeLC) and codec.scheme.batched


class _Opened(NamedTuple):
    """Frames end to end without checksums and second stages, where each ends, and payloads' sizes as they travelled.

    Of frames without a second stage, such a size is 0.
    """

    frames: NDArray[np.uint8]
    ends: NDArray[np.int64]
    nbytes: list[int]

    def travelled(self, found: list[int]) -> list[int]:
        """Returns the sizes of payloads as they travelled, of those that were found to be right; 0 of the others."""
        return [size and (nbytes or size) for size, nbytes in zip(found, self.nbytes, strict=True)]


class TernaryFrames:
    """Frames of some float32 tensors, encoded together, or decoded together where a sender's are.

    Tensors are given by their addresses: each contiguous, of its shape's size, and alive during the call.

    Args:
        codecs: of the tensors, one or more; what they are of other than 3LC counts for `encodes` alone.
        shapes: of the tensors, none of them empty.
        residuals: where each tensor's residual lies; 0 where it has none.

    Attributes:
        encodes: whether it encodes these: `takes_codec` says so of all of them.
    """

    def __init__(
        self, codecs: Sequence[Codec], shapes: Sequence[tuple[int, ...]], residuals: Sequence[int] = ()
    ) -> None:
        self.encodes = all(map(takes_codec, codecs))
        self._pool = codecs[0].pool
        heads = [frames.head(frames.VERSION, ThreeLC.id, ZERO_RUN, "fp32", shape) for shape in shapes]
        self._heads = np.frombuffer(b"".join(heads), np.uint8)
        ends = np.cumsum([len(head) for head in heads])
        self._head_spans = np.stack([ends - [len(head) for head in heads], ends], axis=1)
        self._sizes = np.array([math.prod(shape) for shape in shapes])
        self._residuals = np.array(residuals or [0] * len(shapes), np.int64)
        self._residual_scales = np.array([codec.error_scale for codec in codecs], np.float32)
        self._staged: list[ZstdFrames | None] = [
            ZstdFrames.of(frames.VERSION, ThreeLC.id, ZERO_RUN, shape, -(-math.prod(shape) // TRITS_PER_BYTE))
            if codec.entropy
            else None
            for codec, shape in zip(codecs, shapes, strict=True)
        ]
        schemes = [codec.scheme for codec in codecs]
        self._sparsities = np.array([s.multiplier if isinstance(s, ThreeLC) else 1 for s in schemes], np.float32)

    def select(self, rows: Sequence[int]) -> TernaryFrames:
        """Returns those of some of the tensors, which keep no residual."""
        some, which = copy(self), list(rows)
        some._head_spans, some._sizes = self._head_spans[which], self._sizes[which]
        some._residuals, some._residual_scales = self._residuals[which], self._residual_scales[which]
        some._sparsities = self._sparsities[which]
        some._staged = [self._staged[row] for row in which]
        return some

    def scales(
        self,
        tensors: Addresses,
        others: Addresses | None = None,
        multipliers: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32] | None:
        """Returns every tensor's scale; None where one of them, or what is encoded of it, holds NaN or Inf.

        Args:
            tensors: to encode.
            others: tensors that are subtracted from them first, in float32; None: nothing is.
            multipliers: float32[n], what each tensor's largest magnitude is multiplied by; None: what its codec says.
        """
        return scales_of_many(
            tensors,
            others,
            self._sizes,
            self._residuals,
            self._residual_scales,
            self._sparsities if multipliers is None else multipliers,
        )

    def encode(
        self,
        tensors: Addresses,
        outs: Addresses | None = None,
        multipliers: NDArray[np.float32] | None = None,
        *,
        others: Addresses | None = None,
        scales: NDArray[np.float32] | None = None,
    ) -> list[bytes] | None:
        """Returns the tensors' frames; or None, and nothing has changed, where one of them holds NaN or Inf.

        Args:
            tensors, others, multipliers: as for `scales`.
            outs: float32 tensors to which to add what a receiver decodes; they may be the others.
            scales: what `scales` returned of the same.
        """
        scales = self.scales(tensors, others, multipliers) if scales is None else scales
        if scales is None:
            return None
        with self._pool.lend() as space:
            encoded, ends, payload_nbytes = encode_many(
                tensors,
                others,
                self._sizes,
                self._residuals,
                self._residual_scales,
                scales,
                self._heads,
                self._head_spans,
                workspace=space.kernel,
            )
            result = self._framed(encoded, ends, payload_nbytes, space)
            if outs is not None:
                decode_many(
                    frozen(encoded),
                    np.array(ends),
                    self._heads,
                    self._head_spans,
                    outs,
                    self._sizes,
                    np.ones(len(ends), np.bool_),
                    workspace=space.kernel,
                )
            self._count(payload_nbytes)
        return result

    def _framed(self, encoded: Bytes, ends: Sequence[int], payload_nbytes: list[int], space: Scratch) -> list[bytes]:
        """Returns frames through their second stages, with checksums; notes the payloads' sizes as they travel."""
        data, begin, result = encoded.data, 0, []
        for place, (end, staged) in enumerate(zip(ends, self._staged, strict=True)):
            made: bytes | memoryview = data[begin:end]
            if staged is not None:
                made, payload_nbytes[place] = staged.shrink(made, payload_nbytes[place], space.entropy_stage)
            result.append(frames.with_checksum(made))
            begin = end
        return result

    def multipliers(self, bounds: Sequence[LagBound | None]) -> NDArray[np.float32]:
        """Returns what each tensor's largest magnitude is multiplied by, where a bound on its lag says it."""
        multipliers = self._sparsities.copy()
        set_multipliers(bounds_at(bounds), multipliers)
        return multipliers

    def _count(self, payload_nbytes: Sequence[int]) -> None:
        """Notes the payloads' sizes."""

    def check(self, received: Sequence[bytes | memoryview]) -> list[bool]:
        """Says of each frame whether `decode` would take it. Args as for `decode`."""
        nowhere = np.zeros(len(received), np.int64)
        return [nbytes > 0 for nbytes in self.decode(received, nowhere, nowhere > 0)]

    def decode(
        self, received: Sequence[bytes | memoryview], tensors: Addresses, accumulate: Sequence[bool] | NDArray[np.bool_]
    ) -> list[int]:
        """Fills the tensors, or adds to them.

        Args:
            received: any bytes, one for each tensor.
            tensors: to fill; 0 for frames that are only checked.
            accumulate: whether to add, for each.

        Returns:
            The size of each payload in bytes; 0 for frames of other codecs, options or shapes and damaged ones, which
            are left, and their tensors.
        """
        with self._pool.lend() as space:
            opened = self._open(received, space)
            if not opened.frames.size:
                return [0] * len(received)
            found = decode_many(
                opened.frames,
                opened.ends,
                self._heads,
                self._head_spans,
                tensors,
                self._sizes,
                np.asarray(accumulate),
                workspace=space.kernel,
            )
        return opened.travelled(found)

    def _open(self, received: Sequence[bytes | memoryview], space: Scratch) -> _Opened:
        """Takes the checksums off, and the second stage."""
        checked = [frames.without_checksum(frame) for frame in received]
        nbytes = [0] * len(checked)
        for place, staged in enumerate(self._staged):
            if staged is not None and checked[place]:
                checked[place], nbytes[place] = staged.expand(checked[place], space.entropy_stage)
        ends = np.cumsum([len(frame) for frame in checked])
        return _Opened(np.frombuffer(b"".join(checked), np.uint8), ends, nbytes)


def bounds_at(bounds: Sequence[LagBound | None]) -> Addresses:
    """Returns where bounds on the lag lie; 0 where there is none."""
    return np.array([0 if bound is None else bound.address for bound in bounds], np.int64)
