"""Many 3LC tensors in the host's memory with their contexts, by one kernel call each way.

A small tensor's arithmetic takes a microsecond or two; the calls around it take twenty. Frames, residuals and sums are
the same bits either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire import frames
from thinwire.codecs.base import Context
from thinwire.codecs.lag import LagBound
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.threelc import TRITS_PER_BYTE, ZERO_RUN, ThreeLC
from thinwire.codecs.zstd_frames import ZstdFrames
from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.addresses import Addresses
from thinwire.kernels.numba.decode_many import decode_many
from thinwire.kernels.numba.jit import frozen
from thinwire.kernels.numba.lag import follow_many, set_multipliers
from thinwire.kernels.numba.many import encode_many, scales_of_many


def takes(context: Context) -> bool:
    """Whether a batch takes tensors of this context: float32, by 3LC with default options but sparsity, clip, zstd."""
    scheme = context.codec.scheme
    return isinstance(scheme, ThreeLC) and scheme.batched and context.dtype == "fp32" and context.size > 0


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


class TernaryBatch:
    """Some float32 tensors with their contexts, encoded together, or decoded together from a sender's frames.

    Tensors are given by their addresses: each contiguous, of its context's size, and alive during the call.

    Args:
        contexts: of the tensors, one or more, all on the host; `takes` is true of each.

    Attributes:
        device: that holds the tensors; None for the host's memory.
    """

    device: torch.device | None = None

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts, self._pool = contexts, contexts[0].codec.pool
        heads = [frames.head(frames.VERSION, ThreeLC.id, ZERO_RUN, "fp32", each.shape) for each in contexts]
        self._heads = np.frombuffer(b"".join(heads), np.uint8)
        ends = np.cumsum([len(head) for head in heads])
        self._head_spans = np.stack([ends - [len(head) for head in heads], ends], axis=1)
        self._sizes = np.array([each.size for each in contexts])
        self._residuals = np.array([each.residual_address for each in contexts], np.int64)
        self._residual_scales = np.array([each.codec.error_scale for each in contexts], np.float32)
        self._staged = [
            ZstdFrames.of(frames.VERSION, ThreeLC.id, ZERO_RUN, each.shape, -(-each.size // TRITS_PER_BYTE))
            if each.codec.entropy
            else None
            for each in contexts
        ]
        schemes = [each.codec.scheme for each in contexts]
        self._sparsities = np.array([s.multiplier for s in schemes if isinstance(s, ThreeLC)], np.float32)
        bounds = [each.lag_bound for each in contexts]
        self._bounds = _addresses(bounds) if any(bounds) else None

    # ---- encode

    def encode(
        self,
        tensors: Addresses,
        outs: Addresses | None = None,
        bounds: Sequence[LagBound | None] = (),
        *,
        others: Addresses | None = None,
    ) -> list[bytes] | None:
        """Returns the tensors' frames; or None, and nothing has changed, where one of them holds NaN or Inf.

        Args:
            tensors: to encode.
            outs: float32 tensors that add the decoded frames, as a receiver does; they may be the others.
            bounds: on the lag, one for each tensor; by default those of the contexts.
            others: tensors that are subtracted from them first, in float32; None: nothing is.
        """
        multipliers, at = self._sparsities, _addresses(bounds) if any(bounds) else self._bounds
        if at is not None:
            multipliers = multipliers.copy()
            set_multipliers(at, multipliers)
        scales = scales_of_many(tensors, others, self._sizes, self._residuals, self._residual_scales, multipliers)
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
            made = self._framed(encoded, ends, payload_nbytes, space)
            if outs is not None:
                adds = np.ones(len(ends), np.bool_)
                self._decode(_Opened(frozen(encoded), np.array(ends), []), outs, adds, space)
        if self._bounds is not None:
            assert outs is None or outs is not others  # which are not any more what was subtracted
            follow_many(self._bounds, tensors, self._residuals, self._sizes, others)
        return made

    def _framed(self, encoded: Bytes, ends: Sequence[int], payload_nbytes: list[int], space: Scratch) -> list[bytes]:
        """Returns frames through their second stages, with checksums; tells contexts the sizes that travel."""
        data, begin, result = encoded.data, 0, []
        for context, end, nbytes, staged in zip(self._contexts, ends, payload_nbytes, self._staged, strict=True):
            made: bytes | memoryview = data[begin:end]
            if staged is not None:
                made, nbytes = staged.shrink(made, nbytes, space.entropy_stage)
            result.append(frames.with_checksum(made))
            context.sent(nbytes)
            begin = end
        return result

    # ---- decode

    def check(self, received: Sequence[bytes | memoryview]) -> list[bool]:
        """Says of each frame whether `decode` would take it. Args as for `decode`."""
        nowhere = np.zeros(len(received), np.int64)
        with self._pool.lend() as space:
            return [nbytes > 0 for nbytes in self._decode(self._open(received, space), nowhere, nowhere > 0, space)]

    def decode(
        self, received: Sequence[bytes | memoryview], tensors: Addresses, accumulate: NDArray[np.bool_]
    ) -> list[int]:
        """Fills the tensors, or adds to them.

        Args:
            received: any bytes, one for each tensor.
            tensors: to fill.
            accumulate: whether to add, for each.

        Returns:
            The size of each payload in bytes; 0 for frames of other codecs, options or shapes and damaged ones, which
            are left, and their tensors.
        """
        with self._pool.lend() as space:
            opened = self._open(received, space)
            return opened.travelled(self._decode(opened, tensors, accumulate, space))

    def _decode(self, opened: _Opened, tensors: Addresses, accumulate: NDArray[np.bool_], space: Scratch) -> list[int]:
        if not opened.frames.size:
            return [0] * len(opened.ends)
        return decode_many(
            opened.frames,
            opened.ends,
            self._heads,
            self._head_spans,
            tensors,
            self._sizes,
            accumulate,
            workspace=space.kernel,
        )

    def _open(self, received: Sequence[bytes | memoryview], space: Scratch) -> _Opened:
        """Takes the checksums off, and the second stage."""
        checked = [frames.without_checksum(frame) for frame in received]
        nbytes = [0] * len(checked)
        for place, staged in enumerate(self._staged):
            if staged is not None and checked[place]:
                checked[place], nbytes[place] = staged.expand(checked[place], space.entropy_stage)
        ends = np.cumsum([len(frame) for frame in checked])
        return _Opened(np.frombuffer(b"".join(checked), np.uint8), ends, nbytes)


def _addresses(bounds: Sequence[LagBound | None]) -> Addresses:
    """Returns where bounds on the lag lie; 0 where there is none."""
    return np.array([0 if bound is None else bound.address for bound in bounds], np.int64)
