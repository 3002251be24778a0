"""Tensors that share a message, encoded and added by few calls.

A call into torch or a kernel costs more than the arithmetic of a small tensor, and a model has dozens. So tensors that
3LC codes are one call, on the host or on a GPU; those that travel in a message's batch are rounded and added together.
Any other goes alone. The bits are the same either way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from thinwire.codecs import Context
from thinwire.codecs.encoding import encode_all
from thinwire.codecs.ternary_batch import TernaryBatch
from thinwire.codecs.ternary_device import DeviceTernary
from thinwire.codecs.ternary_frames import takes_codec
from thinwire.kernels.numba.addresses import Addresses
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.packets.batch import rounded
from thinwire.policies.compression import NARROW, is_batched


class TensorSet:
    """Some float32 tensors with their contexts.

    Args:
        contexts: of the tensors.
    """

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts = contexts
        ternary: dict[object, list[int]] = defaultdict(list)
        vectors: dict[object, list[int]] = defaultdict(list)
        for place, context in enumerate(contexts):
            if is_batched(context.codec, context.shape):
                vectors[context.device, context.codec == NARROW].append(place)
            elif context.size and takes_codec(context.codec):
                ternary["host" if context.on_host else (context.codec, context.device)].append(place)
        self._vectors = list(vectors.values())
        self._ternary: list[tuple[list[int], TernaryBatch | DeviceTernary]] = []
        for places in ternary.values():
            some = [contexts[place] for place in places]
            self._ternary.append((places, TernaryBatch(some) if some[0].on_host else DeviceTernary(some)))

    def encode(self, tensors: Sequence[torch.Tensor]) -> list[EncodedTensor]:
        """Returns what is sent of each tensor, given in its context's shape, contiguous and finite.

        Raises:
            NonFiniteError: a scale overflows, or a value that is rounded to bfloat16.
        """
        sent: list[EncodedTensor] = [b""] * len(tensors)
        for places, coder in self._ternary:
            made, at = None, _addresses([tensors[place] for place in places])
            if isinstance(coder, TernaryBatch):
                made = coder.encode(at)
            elif coder.encodes:
                made = coder.encode_on(tensors[places[0]].device, at)
            for place, frame in zip(places, made or (), strict=False):
                sent[place] = frame
        for places in self._vectors:
            self._batch([tensors[place].view(-1) for place in places], places, sent)
        rest = [place for place, each in enumerate(sent) if not each]
        frames = encode_all([self._contexts[place] for place in rest], [tensors[place] for place in rest])
        for place, frame in zip(rest, frames, strict=True):
            sent[place] = frame
        return sent

    def _batch(self, flats: list[torch.Tensor], places: list[int], sent: list[EncodedTensor]) -> None:
        """Fills in values for the message's batch; those of one GPU are copied together."""
        values, narrow = torch.cat(flats).cpu().numpy(), self._contexts[places[0]].codec == NARROW
        values, begin = rounded(values) if narrow else values, 0
        overflows = not np.isfinite(values).all()
        for place, flat in zip(places, flats, strict=True):
            if overflows:  # the tensor's own error says which
                BatchedTensor.of(flat.cpu().numpy(), self._contexts[place].name, narrow=narrow)
            sent[place] = each = BatchedTensor(values[begin : begin + flat.numel()], narrow)
            self._contexts[place].sent(len(each))
            begin += flat.numel()

    def add(self, received: Sequence[EncodedTensor], outs: Sequence[torch.Tensor]) -> list[int]:
        """Adds to flat tensors, where the contexts' are, what was received of each and few calls can add.

        Returns:
            Of each tensor the payload's size; 0 where nothing was added, and the tensor is untouched.
        """
        found = [0] * len(outs)
        frames = [b"" if isinstance(each, BatchedTensor) else each for each in received]
        for places, coder in self._ternary:
            some, at = [frames[place] for place in places], _addresses([outs[place] for place in places])
            if isinstance(coder, TernaryBatch):
                added = coder.decode(some, at, [True] * len(some))
            else:
                added = coder.decode_on(outs[places[0]].device, some, at, np.ones(len(some), np.bool_))
            for place, nbytes in zip(places, added, strict=True):
                found[place] = nbytes
        for places in self._vectors:
            fitting = [place for place in places if _fits(received[place], outs[place])]
            values = [each.values for place in fitting if isinstance(each := received[place], BatchedTensor)]
            if values:
                into = [outs[place] for place in fitting]
                added_up = torch.from_numpy(np.concatenate(values)).to(into[0].device)
                torch._foreach_add_(into, list(torch.split(added_up, [out.numel() for out in into])))
            for place in fitting:
                found[place] = len(received[place])
        return found


def _fits(received: EncodedTensor, out: torch.Tensor) -> bool:
    return isinstance(received, BatchedTensor) and received.fits(out.numel())


def _addresses(tensors: Sequence[torch.Tensor]) -> Addresses:
    return np.array([each.data_ptr() for each in tensors], np.int64)
