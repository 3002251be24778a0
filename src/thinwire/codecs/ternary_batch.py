"""Many 3LC tensors in the host's memory with their contexts: one kernel call encodes all, one decodes all.

A small tensor's arithmetic takes a microsecond or two; the calls around it take twenty. Frames, residuals and sums have
the same bits as tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire import frames
from thinwire.codecs.base import Context
from thinwire.codecs.lag import LagBound, norm, sampled
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.threelc import TRITS_PER_BYTE, ZERO_RUN, ThreeLC
from thinwire.errors import FrameError
from thinwire.frames.layout import CHECKSUM_NBYTES, ZSTD
from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.addresses import Addresses, array_of
from thinwire.kernels.numba.jit import frozen
from thinwire.kernels.numba.many import Given, Heads, decode_many, encode_many, scales_of_many


def takes(context: Context) -> bool:
    """Whether a batch takes this context: float32, 3LC with default options except sparsity, clip and zstd."""
    scheme = context.codec.scheme
    return isinstance(scheme, ThreeLC) and scheme.batched and context.dtype == "fp32" and context.size > 0


class _Opened(NamedTuple):
    """Frames end to end without checksums and second stages, the end of each, and payload sizes on the wire.

    The payload size is 0 for a frame without a second stage.
    """

    frames: NDArray[np.uint8]
    ends: NDArray[np.int64]
    nbytes: list[int]

    def wire_nbytes(self, found: list[int]) -> list[int]:
        """Returns payload sizes on the wire from the decoded sizes `found`; 0 for a frame that was not decoded."""
        return [size and (nbytes or size) for size, nbytes in zip(found, self.nbytes, strict=True)]


class TernaryBatch:
    """Float32 tensors with their contexts, encoded together, or decoded together from one sender's frames.

    Tensors are given by their addresses: each contiguous, of its context's size, and kept alive during the call.

    Args:
        contexts: of the tensors, one or more, all on the host; `takes` is true of each.

    Attributes:
        device: holds the tensors; None for the host's memory.
    """

    device: torch.device | None = None

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts, self._pool = contexts, contexts[0].codec.pool
        heads = [frames.head(frames.VERSION, ThreeLC.id, ZERO_RUN, "fp32", each.shape) for each in contexts]
        ends = np.cumsum([len(head) for head in heads])
        spans = np.stack([ends - [len(head) for head in heads], ends], axis=1)
        self._heads = Heads(np.frombuffer(b"".join(heads), np.uint8), spans)
        self._sizes = np.array([each.size for each in contexts])
        self._residuals = np.array([each.residual_address for each in contexts], np.int64)
        self._residual_scales = np.array([each.codec.error_scale for each in contexts], np.float32)
        schemes = [each.codec.scheme for each in contexts]
        self._sparsities = np.array([s.multiplier for s in schemes if isinstance(s, ThreeLC)], np.float32)
        self._bounds = [each.lag_bound for each in contexts]

    # ---- encode

    def encode(
        self,
        tensors: Addresses,
        outs: Addresses | None = None,
        bounds: Sequence[LagBound | None] = (),
        *,
        minus: Addresses | None = None,
    ) -> list[bytes] | None:
        """Returns the tensors' frames; None, before anything changes, where a tensor holds NaN or Inf.

        Args:
            tensors: to encode.
            outs: float32 tensors to which the decoded frames are added; may be `minus`.
            bounds: on the lag, one for each tensor; by default those of the contexts.
            minus: float32 tensors that are subtracted from `tensors` first, if given.
        """
        multipliers = self._sparsities.copy()
        for place, bound in enumerate(bounds or self._bounds):
            if bound is not None:
                multipliers[place] = bound.multiplier
        with self._pool.lend() as space:
            differences = space.array("ternary.differences", 0 if minus is None else int(self._sizes.max()), np.float32)
            given = Given(tensors, minus, self._sizes, self._residuals, self._residual_scales, differences)
            scales = scales_of_many(given, multipliers)
            if scales is None:
                return None
            encoded, ends, payload_nbytes = encode_many(given, scales, self._heads, workspace=space.kernel)
            made = self._framed(encoded, ends, payload_nbytes, scales, space)
            self._follow(tensors, minus)
            if outs is not None:
                adds = np.ones(len(ends), np.bool_)
                self._decode(_Opened(frozen(encoded), np.array(ends), []), outs, adds, space)
        return made

    def _follow(self, tensors: Addresses, minus: Addresses | None) -> None:
        for place, bound in enumerate(self._bounds):
            if bound is not None and bound.is_due():
                size = self._contexts[place].size
                update = sampled(array_of(tensors[place], size))
                if minus is not None:
                    update = update - sampled(array_of(minus[place], size))
                bound.decide(norm(update), norm(sampled(array_of(self._residuals[place], size))))

    def _framed(
        self,
        encoded: Bytes,
        ends: Sequence[int],
        payload_nbytes: list[int],
        scales: NDArray[np.float32],
        space: Scratch,
    ) -> list[bytes]:
        """Returns frames with second stages and checksums; records payload sizes on the wire in the contexts."""
        data, begin, result = encoded.data, 0, []
        for context, end, nbytes, scale in zip(self._contexts, ends, payload_nbytes, scales.tolist(), strict=True):
            shrunk = space.entropy_stage.compress(data[end - nbytes : end]) if context.codec.entropy else None
            if shrunk is None:
                result.append(frames.with_checksum(data[begin:end]))
            else:
                nbytes, flags = len(shrunk), ZERO_RUN | ZSTD
                result.append(frames.write(ThreeLC.id, "fp32", context.shape, (scale,), flags, shrunk))
            context.sent(nbytes)
            begin = end
        return result

    # ---- decode

    def check(self, received: Sequence[bytes | memoryview]) -> list[bool]:
        """Returns for each frame whether `decode` would take it. Args as for `decode`."""
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
            The size of each payload in bytes; 0 for damaged frames and those of other codecs, options or shapes, whose
            tensors are unchanged.
        """
        with self._pool.lend() as space:
            opened = self._open(received, space)
            return opened.wire_nbytes(self._decode(opened, tensors, accumulate, space))

    def _decode(self, opened: _Opened, tensors: Addresses, accumulate: NDArray[np.bool_], space: Scratch) -> list[int]:
        if not opened.frames.size:
            return [0] * len(opened.ends)
        return decode_many(
            opened.frames,
            opened.ends,
            self._heads,
            tensors,
            self._sizes,
            accumulate,
            workspace=space.kernel,
        )

    def _open(self, received: Sequence[bytes | memoryview], space: Scratch) -> _Opened:
        """Removes checksums and second stages."""
        checked, nbytes = [frames.without_checksum(frame) for frame in received], [0] * len(received)
        for place, context in enumerate(self._contexts):
            if context.codec.entropy and checked[place]:
                checked[place], nbytes[place] = _expanded(received[place], checked[place], context.size, space)
        ends = np.cumsum([len(frame) for frame in checked])
        return _Opened(np.frombuffer(b"".join(checked), np.uint8), ends, nbytes)


def _expanded(
    frame: bytes | memoryview, plain: bytes | memoryview, size: int, space: Scratch
) -> tuple[bytes | memoryview, int]:
    """Undoes a frame's second stage; returns the frame without its checksum, and its payload size on the wire.

    A frame without the stage is returned unchanged, with 0; a damaged one as empty bytes.
    """
    try:
        parsed = frames.parse(frame, copy=False)
        if not parsed.zstd:
            return plain, 0
        payload = space.entropy_stage.decompress(parsed.payload, -(-size // TRITS_PER_BYTE))
    except FrameError:
        return b"", 0
    whole = frames.write(parsed.codec, parsed.dtype, parsed.shape, parsed.scales, parsed.flags & ~ZSTD, payload)
    return whole[:-CHECKSUM_NBYTES], len(parsed.payload)
