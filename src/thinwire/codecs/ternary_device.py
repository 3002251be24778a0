"""Frames of many 3LC tensors on a GPU, by one batch of launches and one call of the host's kernels each way.

What `encoding.encode_all` and `decode_all` do for any tensors costs the host some tens of microseconds for each, where
a GPU has finished all of them in a few hundred. Frames, residuals and sums are the same bits either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.codecs.base import Context
from thinwire.codecs.device import why_not
from thinwire.codecs.ternary_frames import TernaryFrames, takes_codec
from thinwire.codecs.threelc import ThreeLC
from thinwire.kernels.numba.addresses import Addresses
from thinwire.kernels.numba.decode_many import payloads_of_many
from thinwire.kernels.numba.many import frames_of_many

_CODEC_NBYTES = 4
"""What a frame begins with: two bytes that every frame has, the version, and the codec's number."""


class DeviceTernary(TernaryFrames):
    """Some flat float32 tensors on a GPU with their contexts, encoded together, or decoded from a sender's frames.

    Args:
        contexts: of the tensors, one or more, none of them empty.

    Attributes:
        encodes: whether it encodes these: all are 3LC's with the same options, which are the defaults but for sparsity
            and zstd, on a GPU, and without a bound on the lag.
    """

    def __init__(self, contexts: Sequence[Context]) -> None:
        codecs = [context.codec for context in contexts]
        shapes, residuals = [context.shape for context in contexts], [context.residual_address for context in contexts]
        super().__init__(codecs, shapes, residuals)
        alike = {(each.codec.scheme, each.device, held > 0) for each, held in zip(contexts, residuals, strict=True)}
        self.encodes = len(alike) == 1 and all(
            not context.on_host and context.dtype == "fp32" and context.lag_bound is None and takes_codec(context.codec)
            for context in contexts
        )
        self._contexts = contexts

    def encode_on(self, device: torch.device, addresses: Addresses) -> list[bytes] | None:
        """Returns the frames of tensors at these addresses, and keeps in the residuals what was not sent.

        None, and nothing has changed, where the device has no kernels, is not the contexts', or a tensor holds NaN or
        Inf.
        """
        scheme = self._contexts[0].codec.scheme
        if why_not(device) or device != self._contexts[0].device or not isinstance(scheme, ThreeLC):
            return None
        triton, workspace = import_module("thinwire.kernels.triton.ternary"), self._pool.take_on(device)
        try:
            arrived = triton.encode_ternary(
                triton.Arrays(addresses, self._sizes, torch.float32),
                sparsity=scheme.multiplier,
                residuals=triton.Arrays(self._residuals, self._sizes, torch.float32) if self._residuals.any() else None,
                residual_scale=self._residual_scales,
                together=True,
                workspace=workspace,
            ).arrive()
            if not arrived.finite.all():
                return None
            payload_nbytes = np.diff(arrived.ends, prepend=0).tolist()
            with self._pool.lend() as space:
                made, ends = frames_of_many(
                    arrived.scales.astype(np.float32),
                    arrived.payloads,
                    arrived.ends,
                    self._heads,
                    self._head_spans,
                    workspace=space.kernel,
                )
                result = self._framed(made, ends, payload_nbytes, space)
        except BaseException:  # such as no memory left; the tensors may be freed from now on
            workspace.synchronize()
            raise
        finally:
            self._pool.give_back_on(workspace)
        for context, nbytes in zip(self._contexts, payload_nbytes, strict=True):
            context.sent(nbytes)
        return result

    def decode_on(
        self,
        device: torch.device,
        received: Sequence[bytes | memoryview],
        addresses: Addresses,
        accumulate: NDArray[np.bool_],
    ) -> list[int]:
        """Fills tensors at these addresses, or adds to them. Args and returns as for `decode`."""
        codec = self._heads[:_CODEC_NBYTES].tobytes()
        # Where all frames are of another codec, nobody hashes them here and then once more.
        if why_not(device) or not any(bytes(frame[:_CODEC_NBYTES]) == codec for frame in received):
            return [0] * len(received)
        triton = import_module("thinwire.kernels.triton.ternary_decode")
        with self._pool.lend() as space:
            opened = self._open(received, space)
            if not opened.frames.size:
                return [0] * len(received)
            begins, scales = payloads_of_many(opened.frames, opened.ends, self._heads, self._head_spans, self._sizes)
            for adds in (False, True):
                places = np.flatnonzero((begins > 0) & (accumulate == adds))
                if not places.size:
                    continue
                payloads = [opened.frames[begins[place] : opened.ends[place]] for place in places]
                workspace = self._pool.take_on(device)
                try:
                    triton.decode_checked(
                        payloads,
                        scales=scales[places].astype(np.float64),
                        outs=triton.Arrays(addresses[places], self._sizes[places], torch.float32),
                        accumulate=adds,
                        workspace=workspace,
                    )
                finally:
                    self._pool.give_back_on(workspace)
        return opened.travelled(np.where(begins > 0, opened.ends - begins, 0).tolist())
