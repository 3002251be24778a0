"""FSDP2 and HSDP around a model, with `fsdp.compress` or without; a separate file, for FSDP imports in a second."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from thinwire.hooks import fsdp
from thinwire.names import parse_name
from thinwire.runtime.digests import bits_digest
from thinwire_lab.bench.names import SITES


def shard(module: nn.Module, name: str, *, seed: int) -> fsdp.ShardedState | None:
    """Shards every linear or convolution layer, and the rest together; compresses the exchanges."""
    kind, _, method = name.partition(":")
    ranks = torch.arange(dist.get_world_size())
    if kind == "hsdp":
        mesh = DeviceMesh("cpu", ranks.view(SITES, -1), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = DeviceMesh("cpu", ranks)
    held = Counter(id(each) for _, each in module.named_parameters(remove_duplicate=False))
    tied = {each for each, times in held.items() if times > 1}  # shared parameters are sharded with the whole model
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and not tied.intersection(map(id, layer.parameters())):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    codec, options = parse_name(method, "codec")
    return None if codec == "none" else fsdp.compress(module, codec, seed=seed, **options)


def report(state: fsdp.ShardedState | None) -> str:
    """Returns the text of `fsdp.report`; empty for stock FSDP2."""
    return "" if state is None else str(fsdp.report(state))


def digest(module: nn.Module) -> str:
    """Returns a digest of the whole parameters; all ranks call it."""
    return bits_digest(each.full_tensor() for each in module.parameters() if isinstance(each, DTensor))
