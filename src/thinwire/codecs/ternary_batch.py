"""Many 3LC tensors in the host's memory, by one kernel call each way.

A small tensor's arithmetic takes a microsecond or two; the calls around it take twenty. Frames, residuals and sums are
the same bits either way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire import frames
from thinwire.codecs.base import Context
from thinwire.codecs.threelc import ZERO_RUN, ThreeLC
from thinwire.kernels.numba.many import Addresses, decode_many, encode_many


def takes(context: Context) -> bool:
    """Whether a batch encodes tensors of this context."""
    codec, scheme = context.codec, context.codec.scheme
    plain = codec.entropy is None and context.on_host and context.dtype == "fp32"
    return plain and isinstance(scheme, ThreeLC) and scheme.batched


class TernaryBatch:
    """Some float32 tensors, encoded together with their contexts, or decoded together from a sender's frames.

    Tensors are given by their addresses: each contiguous, of its context's size, and alive during the call.

    Args:
        contexts: of the tensors, one or more, none of them empty.

    Attributes:
        encodes: whether it encodes these: all of them are 3LC's, with default options but for the sparsity.
    """

    def __init__(self, contexts: Sequence[Context]) -> None:
        self.encodes = all(map(takes, contexts))
        self._contexts, self._pool = contexts, contexts[0].codec.pool
        heads = [frames.head(frames.VERSION, ThreeLC.id, ZERO_RUN, "fp32", context.shape) for context in contexts]
        self._heads = np.frombuffer(b"".join(heads), np.uint8)
        self._head_ends = np.cumsum([len(head) for head in heads])
        self._sizes = np.array([context.size for context in contexts])
        self._residuals = np.array([context.residual_address for context in contexts])
        self._residual_scales = np.array([context.codec.error_scale for context in contexts], np.float32)
        schemes = [context.codec.scheme for context in contexts]
        self._sparsities = np.array([s.sparsity if isinstance(s, ThreeLC) else 1 for s in schemes], np.float32)

    def encode(self, tensors: Addresses) -> list[bytes] | None:
        """Returns the tensors' frames; or None, and nothing has changed, where one of them holds NaN or Inf."""
        with self._pool.lend() as space:
            made = encode_many(
                tensors,
                self._sizes,
                self._residuals,
                self._residual_scales,
                self._sparsities,
                self._heads,
                self._head_ends,
                workspace=space.kernel,
            )
            if made is None:
                return None
            data, begin, result = made[0].data, 0, []
            for context, end, payload_nbytes in zip(self._contexts, *made[1:], strict=True):
                result.append(frames.with_checksum(data[begin:end]))
                context.sent(payload_nbytes)
                begin = end
        return result

    def decode(
        self, received: Sequence[bytes | memoryview], tensors: Addresses, accumulate: Sequence[bool]
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
        checked = [frames.without_checksum(frame) for frame in received]
        if not any(checked):
            return [0] * len(checked)
        with self._pool.lend() as space:
            return decode_many(
                np.frombuffer(b"".join(checked), np.uint8),
                np.cumsum([len(frame) for frame in checked]),
                self._heads,
                self._head_ends,
                tensors,
                self._sizes,
                np.array(accumulate),
                workspace=space.kernel,
            )
