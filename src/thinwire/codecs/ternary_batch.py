"""Many 3LC tensors with their contexts, by one kernel call each way: residuals, bounds on the lag, payloads' sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs.base import Context
from thinwire.codecs.ternary_frames import TernaryFrames, bounds_at, takes_codec
from thinwire.kernels.numba.addresses import Addresses
from thinwire.kernels.numba.lag import follow_many, set_multipliers


def takes(context: Context) -> bool:
    """Whether a batch encodes tensors of this context."""
    return context.on_host and context.dtype == "fp32" and takes_codec(context.codec)


class TernaryBatch(TernaryFrames):
    """Some float32 tensors with their contexts, encoded together, or decoded together from a sender's frames.

    Args:
        contexts: of the tensors, one or more, none of them empty.

    Attributes:
        encodes: whether it encodes these: all of them are 3LC's, with default options but for sparsity, clip and zstd.
    """

    def __init__(self, contexts: Sequence[Context]) -> None:
        codecs, shapes = [context.codec for context in contexts], [context.shape for context in contexts]
        super().__init__(codecs, shapes, [context.residual_address for context in contexts])
        self.encodes = all(map(takes, contexts))
        self._contexts = contexts
        bounds = [context.lag_bound for context in contexts]
        self._bounds = bounds_at(bounds) if any(bounds) else None

    def scales(
        self,
        tensors: Addresses,
        others: Addresses | None = None,
        multipliers: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32] | None:
        if self._bounds is not None:
            multipliers = self._sparsities.copy() if multipliers is None else multipliers
            set_multipliers(self._bounds, multipliers)
        return super().scales(tensors, others, multipliers)

    def encode(
        self,
        tensors: Addresses,
        outs: Addresses | None = None,
        multipliers: NDArray[np.float32] | None = None,
        *,
        others: Addresses | None = None,
        scales: NDArray[np.float32] | None = None,
    ) -> list[bytes] | None:
        made = super().encode(tensors, outs, multipliers, others=others, scales=scales)
        if made is not None and self._bounds is not None:
            assert outs is None or outs is not others  # which are not any more what was subtracted
            follow_many(self._bounds, tensors, self._residuals, self._sizes, others)
        return made

    def _count(self, payload_nbytes: Sequence[int]) -> None:
        for context, nbytes in zip(self._contexts, payload_nbytes, strict=True):
            context.sent(nbytes)
