"""Refusals of `fsdp.compress`, and of the hook in the next backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import mlp, refusal, run_ranks
from tests.hooks.fsdp_ranks import CODEC, KINDS, LOSSLESS, gradients, mesh, sharded, sharded_layers, train
from thinwire.hooks import fsdp
from thinwire.hooks.fsdp.parameter_groups import check_backend

UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether this torch can reduce parameters without gradients."""
EXPECTED = {
    "unwrapped": "is sharded; wrap it first",
    "ddp": "use ddp.compress",
    "fsdp1": "from torch.distributed.fsdp import fully_shard",
    "codec": "4lc",
    "option": "sparsity",
    "down": "codec_down",
    "gather": "inside a replica",
    "twice": "has a communication hook already",
    "crossed": "order the ranks of all sites alike",
    "unused": "set_reduce_scatter_unused_params(True)",
    "optimizer in backward": "step the optimizer after the backward pass",
    "three dimensions": "a mesh of one dimension",
    "two meshes": "one mesh for all",
    "all-reduce hooked later, hsdp": "set_all_reduce_hook was called after fsdp.compress",
    "all-reduce hooked later, fsdp": "set_all_reduce_hook was called after fsdp.compress",
    "reduce-scatter replaced later": "set_custom_reduce_scatter was called after fsdp.compress",
    "unfrozen, hsdp": "last.bias was frozen when fsdp.compress was called",
    "unfrozen, fsdp": "last.bias was frozen when fsdp.compress was called",
    "frozen in turn, hsdp": "a was trained when",
    "frozen in turn, fsdp": "a was trained when",
}
"""A part of each ConfigError."""


class Pair(nn.Module):
    """Two parameters of equal size, of which a pass may use the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8, 12)), nn.Parameter(torch.ones(8, 12))

    def forward(self, x: torch.Tensor, *, half: bool = False) -> torch.Tensor:
        return x @ (self.a if half else self.a * self.b).T


def refuse_later_changes(rank: int, kind: str) -> dict[str, str]:
    """Hooks and frozen parameters that change after `compress`."""
    heard = {}
    model = sharded_layers(kind)
    fsdp.compress(model, **LOSSLESS)
    gradients(model, rank, 0)
    model.last.set_all_reduce_hook(lambda _: None)
    heard[f"all-reduce hooked later, {kind}"] = refusal(partial(gradients, model, rank, 1))
    if kind == "fsdp":
        model = sharded_layers(kind)
        fsdp.compress(model, **LOSSLESS)
        gradients(model, rank, 0)
        model.last.set_custom_reduce_scatter(model.first._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm)
        heard["reduce-scatter replaced later"] = refusal(partial(gradients, model, rank, 1))
    model = sharded_layers(kind)
    model.last.bias.requires_grad_(False)
    fsdp.compress(model, **LOSSLESS)
    model.last.bias.requires_grad_(True)
    heard[f"unfrozen, {kind}"] = refusal(partial(gradients, model, rank, 0))
    pair: Any = fully_shard(Pair(), mesh=mesh(kind))
    pair.b.requires_grad_(False)
    fsdp.compress(pair, **LOSSLESS)
    gradients(pair, rank, 0)
    pair.b.requires_grad_(True)
    pair.a.requires_grad_(False)
    heard[f"frozen in turn, {kind}"] = refusal(partial(gradients, pair, rank, 1))
    return heard


def refuse(rank: int) -> dict[str, str]:
    model = sharded("hsdp")
    fsdp.compress(model, **CODEC)
    calls: dict[str, Any] = {
        "unwrapped": (mlp(), {}),
        "ddp": (DistributedDataParallel(mlp()), {}),
        "fsdp1": (FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")), {}),
        "codec": (sharded("hsdp"), {"codec": "4lc"}),
        "option": (sharded("hsdp"), {"sparsity": 7.0}),
        "down": (sharded("fsdp"), {"codec_down": "int8"}),
        "gather": (sharded("hsdp"), {"gather": "int8"}),
        "twice": (model, CODEC),
        "crossed": (sharded_layers("crossed"), {}),
        "differs": (sharded("hsdp"), {"codec": "3lc" if rank != 3 else "int8", "measure_link": False}),
    }
    heard = {name: refusal(partial(fsdp.compress, given, **options)) for name, (given, options) in calls.items()}
    heard["compressed still"] = refusal(partial(train, model, rank, 2))
    for unused in (False, True)[: 1 + UNUSED]:
        half: Any = fully_shard(Pair(), mesh=mesh("hsdp"))
        if unused:
            half.set_reduce_scatter_unused_params(True)
        fsdp.compress(half, min_numel=1, **CODEC)
        heard["unused, reduced" if unused else "unused"] = refusal(partial(gradients, half, rank, 0, half=True))
    model = sharded("fsdp")
    fsdp.compress(model, **CODEC)
    for parameter in model.parameters():  # as an optimizer that steps in the backward pass
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    heard["optimizer in backward"] = refusal(partial(train, model, rank, 1))
    cube = DeviceMesh("cpu", [[[0], [1]], [[2], [3]]], mesh_dim_names=("replicate", "shard", "tensor"))
    parallel = mlp()
    for layer in parallel:
        for name, parameter in list(layer.named_parameters(recurse=False)):
            shared = distribute_tensor(parameter.detach(), cube["tensor"], [Replicate()])
            layer.register_parameter(name, nn.Parameter(shared))
    fully_shard(parallel, mesh=cube["replicate", "shard"])
    heard["three dimensions"] = refusal(partial(fsdp.compress, parallel, **CODEC))
    mixed = mlp()
    fully_shard(mixed[0], mesh=mesh("hsdp"))
    fully_shard(mixed, mesh=mesh("fsdp"))
    heard["two meshes"] = refusal(partial(fsdp.compress, mixed, **CODEC))
    for kind in KINDS:
        heard |= refuse_later_changes(rank, kind)
    return heard


def test_models_meshes_options_and_later_changes_are_refused() -> None:
    for heard in run_ranks(4, refuse, group_timeout_s=60.0):
        assert "rank 3 has codec" in heard["differs"] and heard["differs"].startswith("ProtocolError")
        assert heard["compressed still"] == "nothing", "after a second compress was refused"
        assert heard.get("unused, reduced", "nothing") == "nothing"
        for name, text in EXPECTED.items():
            assert heard[name].startswith("ConfigError: ") and text in heard[name], (name, heard[name])


def test_gradients_on_a_gpu_need_more_than_gloo() -> None:
    class Backend:
        def name(self) -> str:
            return "gloo"

    class Group:
        def _get_backend(self, device: torch.device) -> Backend:
            return Backend()

    group: Any = Group()
    with pytest.raises(tw.ConfigError, match="cpu:gloo,cuda:nccl"):
        check_backend(torch.device("cuda"), group)
    check_backend(torch.device("cpu"), group)
