"""Encodes and decodes many tensors: one after the other on the host, in batches of few launches on a GPU.

On a GPU, encoding runs on a separate stream while the caller computes: `Encoding(…)` queues the work, `.frames()` waits
for it. The tensors must not change in between.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch.autograd.graph import increment_version

from thinwire.codecs import device
from thinwire.codecs.base import Context
from thinwire.codecs.decoding import fill_all
from thinwire.codecs.device_coder import Entry
from thinwire.codecs.lag import LagBound, follow_tensors
from thinwire.codecs.registry import open_parsed
from thinwire.codecs.scheme import StepOptions
from thinwire.codecs.tensors import Tensor, check_out, data_address
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.frames import parse


def encode_all(
    contexts: Sequence[Context], tensors: Sequence[Tensor], options: Sequence[StepOptions] | None = None
) -> list[bytes]:
    """Encodes many tensors, each with its context; on a GPU with few launches and one wait for all of them.

    Args:
        contexts: on the host or on GPUs, of any codecs.
        tensors: one for each context.
        options: of each tensor at this step, as for `context.encode`; None: no tensor has any.

    Returns:
        Their frames, equal to those of `context.encode(tensor)` one after the other.

    Raises:
        NonFiniteError: NaN or Inf in one of them. On a GPU, tensors of the same device, dtype, scheme and s then keep
            their residuals. All other tensors count as sent.
        ConfigError: a tensor does not fit its context, a context is given twice, or the numbers of contexts and tensors
            differ.

    Example:
        >>> import torch, thinwire as tw
        >>> codec, tensors = tw.codec("3lc"), [torch.ones(3), torch.zeros(4)]
        >>> frames = encode_all([codec.context(t) for t in tensors], tensors)
        >>> [tw.decode(frame).tolist() for frame in frames]
        [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
    """
    return Encoding(contexts, tensors, options).frames()


def decode_all(
    frames: Sequence[bytes | bytearray | memoryview], outs: Sequence[Tensor], *, accumulate: bool = False
) -> None:
    """Decodes many frames, each into a separate tensor; on a GPU with few launches.

    The host waits only for an earlier call's decoding whose memory it needs.

    Args:
        frames: of any codecs.
        outs: one for each, of its shape, on the host or on GPUs; no two share memory.
        accumulate: adds into them instead of overwriting them.

    Raises:
        FrameError: not a valid frame. Its tensor is untouched; others may have changed.
        ConfigError: a tensor does not fit or is given twice, or the numbers of frames and tensors differ. No tensor
            has changed.

    Example:
        >>> import torch, thinwire as tw
        >>> outs = [torch.ones(3), torch.ones(2)]
        >>> decode_all([tw.codec("3lc").encode(out) for out in outs], outs, accumulate=True)
        >>> outs
        [tensor([2., 2., 2.]), tensor([2., 2.])]
    """
    if len(frames) != len(outs):
        raise ConfigError(f"{len(frames)} frames for {len(outs)} tensors; there must be one for each")
    heads = [parse(frame, copy=False) for frame in frames]
    for head, out in zip(heads, outs, strict=True):
        check_out(out, head.shape)  # before a zstd stage is undone, which allocates memory for the frame's shape
    begins = [data_address(out) for out in outs if math.prod(out.shape)]
    if len({*begins}) < len(begins):
        raise ConfigError("a tensor is given twice: its frames are to be decoded in two calls")
    try:
        fill_all([open_parsed(head) for head in heads], outs, [accumulate] * len(outs))
    finally:
        for out in outs:
            if isinstance(out, torch.Tensor) and not out.is_inference():
                increment_version(out)  # so that autograd refuses saved tensors which this overwrote


class Encoding:
    """The encoding of many tensors: the constructor queues it, `frames` waits for it.

    Tensors on the host are encoded at once. Args and errors as for `encode_all`; for tensors on a GPU, `frames` raises
    NonFiniteError.
    """

    def __init__(
        self, contexts: Sequence[Context], tensors: Sequence[Tensor], options: Sequence[StepOptions] | None = None
    ) -> None:
        if len(contexts) != len(tensors):
            raise ConfigError(f"{len(contexts)} contexts for {len(tensors)} tensors; there must be one for each")
        if len({*map(id, contexts)}) < len(contexts):
            raise ConfigError(
                "a context is given twice: encode its second tensor in another call, which adds the first's residual"
            )
        self._contexts, self._frames = contexts, [b""] * len(tensors)
        self._lags: list[tuple[LagBound, torch.Tensor, torch.Tensor | None]] = []
        groups: dict[tuple[object, ...], tuple[list[int], list[Entry]]] = defaultdict(lambda: ([], []))
        nothing = StepOptions()
        for place, (context, tensor) in enumerate(zip(contexts, tensors, strict=True)):
            known = nothing if options is None else options[place]
            if context.on_host:
                self._frames[place] = context.encode(tensor, **known)
                continue
            entry = context.entry(tensor, known)
            places, entries = groups[entry.batch_key]
            places.append(place)
            entries.append(entry)
            if context.lag_bound is not None:
                self._lags.append((context.lag_bound, entry.flat.values, entry.residual))
        self._batches: list[tuple[list[int], device.Batch]] = []
        try:
            for places, entries in groups.values():
                self._batches.append((places, device.Batch(entries)))
        except BaseException:  # the caller gets no object to call `frames` on, and queued batches hold shared memory
            for _, batch in self._batches:
                with suppress(Exception):
                    batch.finish()
            raise

    def frames(self) -> list[bytes]:
        """Waits for the compressed bytes and returns the frames, in the order of the tensors. Call once."""
        failed: list[Exception] = []
        for places, batch in self._batches:
            try:
                finished = batch.finish()
            except Exception as error:  # finish the other batches too: they hold shared memory
                failed.append(error)
                continue
            for place, encoded in zip(places, finished, strict=True):
                self._contexts[place].sent(encoded.payload_nbytes)
                self._frames[place] = encoded.frame
        if failed:  # any other error first: a caller may skip a step for NaN or Inf
            raise min(failed, key=lambda error: isinstance(error, NonFiniteError))
        follow_tensors(self._lags)
        return self._frames
