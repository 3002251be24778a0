"""Buffers that local updates do not average: integers, and what began with Inf or has another shape since.

Each worker has its own while it trains. At a flush all ranks take rank 0's, as DistributedDataParallel has it before
every forward pass; with servers nothing carries them, and a warning names them.
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
"""A buffer's name in the model, the module that has it, its name there, and the buffer."""


class OwnBuffers:
    """The buffers of one worker that are in its model's state and are not averaged.

    Args:
        model: that is trained.
        averaged: tensors that are.
    """

    def __init__(self, model: nn.Module, averaged: Sequence[Exchanged]) -> None:
        self._model = model
        self._averaged = {id(each.parameter): each.shown.shape for each in averaged}
        empty = {name for name, _, _, each in self._found() if not each.numel()}  # of which a warning tells already
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
        # Of copies: memory that NumPy has seen can no longer be resized.
        return {name: f"{tuple(each.shape)} {bits_digest([each.clone()])}" for name, each in found}

    def follow_rank_0(self, peers: PeerGroup) -> None:
        """Gives every rank those of rank 0 that some rank has otherwise; all ranks call it, between exchanges."""
        told = [json.loads(each) for each in gather(peers, json.dumps(self._digests()).encode())]
        others = [name for name, digest in told[0].items() if any(each.get(name) != digest for each in told)]
        if not others:
            return
        found = {name: (module, key, buffer) for name, module, key, buffer in self._found()}
        head, values = list[tuple[str, str, tuple[int, ...]]](), b""
        if peers.rank == 0:
            for name in others:
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
        """Names, once, floating-point ones that have changed since the beginning: models differ by them."""
        now = self._digests(floating=True)
        if changed := [name for name, digest in self._began.items() if now.get(name, digest) != digest]:
            self._began = {}
            caution(
                f"buffers {', '.join(changed[:4])}{', …' if len(changed) > 4 else ''} began with Inf, are not "
                "exchanged, and have changed since: models differ by them. Save one worker's for all"
            )
