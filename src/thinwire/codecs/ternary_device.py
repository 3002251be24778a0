"""Many 3LC tensors on a GPU with their contexts: one batch of launches and one host kernel call encode or decode all.

`encoding.encode_all` and `decode_all` cost the host some tens of microseconds a tensor; a GPU finishes all tensors in a
few hundred. Frames, residuals and sums have the same bits as tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.codecs.base import Context
from thinwire.codecs.device import why_not
from thinwire.codecs.lag import LagBound
from thinwire.codecs.ternary_batch import TernaryBatch
from thinwire.codecs.threelc import ThreeLC
from thinwire.kernels.numba.addresses import Addresses
from thinwire.kernels.numba.many import frames_of_many, payloads_of_many

_CODEC_NBYTES = 4
"""The start of a frame: two magic bytes, the version, and the codec's number."""


class DeviceTernary(TernaryBatch):
    """`TernaryBatch` of tensors on a GPU.

    Args:
        contexts: of the tensors, one or more, of one codec and on one GPU.
    """

    device: torch.device

    def __init__(self, contexts: Sequence[Context]) -> None:
        super().__init__(contexts)
        self.device = contexts[0].device

    def encode(
        self,
        tensors: Addresses,
        outs: Addresses | None = None,
        bounds: Sequence[LagBound | None] = (),
        *,
        minus: Addresses | None = None,
    ) -> list[bytes] | None:
        """As `TernaryBatch.encode`; also None for tensors with a bound on the lag, or without kernels for the device.

        Args:
            tensors: to encode.
            outs, bounds, minus: must be None, because no kernel takes them.
        """
        scheme = self._contexts[0].codec.scheme
        plain = outs is None and minus is None and not any(self._bounds)
        if not plain or why_not(self.device) or not isinstance(scheme, ThreeLC):
            return None
        triton = import_module("thinwire.kernels.triton.ternary")
        with self._pool.lend_on(self.device) as workspace, self._pool.lend() as space:
            arrived = triton.encode_ternary(
                triton.Arrays(tensors, self._sizes, torch.float32),
                sparsity=scheme.multiplier,
                residuals=triton.Arrays(self._residuals, self._sizes, torch.float32) if self._residuals.any() else None,
                residual_scale=self._residual_scales,
                together=True,
                workspace=workspace,
            ).arrive()
            if not arrived.finite.all():
                return None
            payload_nbytes = np.diff(arrived.ends, prepend=0).tolist()
            scales = arrived.scales.astype(np.float32)
            made, ends = frames_of_many(scales, arrived.payloads, arrived.ends, self._heads, workspace=space.kernel)
            return self._framed(made, ends, payload_nbytes, scales, space)

    def decode(
        self, received: Sequence[bytes | memoryview], tensors: Addresses, accumulate: NDArray[np.bool_]
    ) -> list[int]:
        codec = self._heads.data[:_CODEC_NBYTES].tobytes()
        # For frames of another codec no checksum is needed here: their decoder checks it.
        if why_not(self.device) or not any(bytes(frame[:_CODEC_NBYTES]) == codec for frame in received):
            return [0] * len(received)
        triton = import_module("thinwire.kernels.triton.ternary_decode")
        with self._pool.lend() as space:
            opened = self._open(received, space)
            if not opened.frames.size:
                return [0] * len(received)
            begins, scales = payloads_of_many(opened.frames, opened.ends, self._heads, self._sizes)
            for adds in (False, True):
                places = np.flatnonzero((begins > 0) & (accumulate == adds))
                if not places.size:
                    continue
                payloads = [opened.frames[begins[place] : opened.ends[place]] for place in places]
                with self._pool.lend_on(self.device) as workspace:
                    triton.decode_checked(
                        payloads,
                        scales=scales[places].astype(np.float64),
                        outs=triton.Arrays(tensors[places], self._sizes[places], torch.float32),
                        accumulate=adds,
                        workspace=workspace,
                    )
        return opened.wire_nbytes(np.where(begins > 0, opened.ends - begins, 0).tolist())
