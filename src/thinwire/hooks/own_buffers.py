"""Buffers that local updates do not average: integers, buffers that began with Inf, and buffers that changed shape.

Each worker keeps its own while it trains. At a flush all ranks copy rank 0's, as DistributedDataParallel does before
every forward pass; servers do not exchange them, and a warning names them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from thinwire.cautions import caution
from thinwire.runtime.digests import bits_digest
from thinwire.runtime.model_places import Exchanged
from thinwire.runtime.peers import from_first, gather
from thinwire.transports.peers import PeerGroup

Found = tuple[str, nn.Module, str, torch.Tensor]
"""A buffer's name in the model, its module, its name in the module, and the buffer."""


class OwnBuffers:
    """The buffers of one worker that are in its model's state and are not averaged.

    Args:
        model: the trained model.
        averaged: the tensors that are averaged.
    """

    def __init__(self, model: nn.Module, averaged: Sequence[Exchanged]) -> None:
        self._model = model
        self._averaged = {id(each.parameter): each.shown.shape for each in averaged}
        empty = {name for name, _, _, each in self._found() if not each.numel()}  # another warning names these
        self._began = {name: digest for name, digest in self._digests(floating=True).items() if name not in empty}

    def _found(self) -> Iterator[Found]:
        for path, module in self._model.named_modules():
            for key, buffer in module._buffers.items():
                is_plain = buffer is not None and buffer.layout == torch.strided and not buffer.is_meta
                if buffer is None or not is_plain or key in module._non_persistent_buffers_set:
                    continue
                if self._averaged.get(id(buffer)) != buffer.shape:
                    yield f"{path}.{key}".lstrip("."), module, key, buffer

    def _digests(self, *, floating: bool = False) -> dict[str, str]:
        found = [(name, each) for name, _, _, each in self._found() if each.is_floating_point() or not floating]
        # Digests copies: NumPy's view of a buffer's memory would keep it from being resized.
        return {name: f"{tuple(each.shape)} {bits_digest([each.clone()])}" for name, each in found}

    def follow_rank_0(self, peers: PeerGroup) -> None:
        """Copies rank 0's buffers to every rank, if some rank's differ; all ranks call it, between exchanges."""
        digests = [json.loads(each) for each in gather(peers, json.dumps(self._digests()).encode())]
        differing = [name for name, digest in digests[0].items() if any(each.get(name) != digest for each in digests)]
        if not differing:
            return
        found = {name: (module, key, buffer) for name, module, key, buffer in self._found()}
        head, values = list[tuple[str, str, tuple[int, ...]]](), b""
        if peers.rank == 0:
            for name in differing:
                buffer = found[name][2].detach().cpu().contiguous()
                head.append((name, str(buffer.dtype).removeprefix("torch."), tuple(buffer.shape)))
                values += buffer.reshape(-1).view(torch.uint8).numpy().tobytes()
        head = json.loads(from_first(peers, json.dumps(head).encode()))
        left = bytearray(from_first(peers, values))
        for name, dtype, shape in head if peers.rank else ():
            sent = torch.empty(shape, dtype=getattr(torch, dtype))
            if nbytes := sent.nbytes:
                sent = torch.frombuffer(left[:nbytes], dtype=sent.dtype).reshape(shape)
                del left[:nbytes]
            self._take(name, sent)

    def _take(self, name: str, sent: torch.Tensor) -> None:
        path, _, key = name.rpartition(".")
        module = self._model.get_submodule(path)
        buffer = module._buffers.get(key)
        if buffer is not None and buffer.shape == sent.shape and buffer.dtype == sent.dtype:
            with torch.no_grad():
                buffer.copy_(sent)
        else:
            module._buffers[key] = sent if buffer is None else sent.to(buffer.device)

    def warn_of_changed(self) -> None:
        """Warns once of floating-point buffers that have changed since the beginning: models differ in them."""
        now = self._digests(floating=True)
        if changed := [name for name, digest in self._began.items() if now.get(name, digest) != digest]:
            self._began = {}
            caution(
                f"buffers {', '.join(changed[:4])}{', …' if len(changed) > 4 else ''} began with Inf, are not "
                "exchanged, and have changed since: models differ in them. Save one worker's for all"
            )
