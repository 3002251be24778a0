"""Meshes, models and trainings of the FSDP2 tests, which run on four ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.hooks.ddp_ranks import Weights, mlp
from tests.hooks.ddp_ranks import train as train  # the same loop
from thinwire.hooks import fsdp

KINDS = ("hsdp", "fsdp")
CODEC: dict[str, Any] = {"codec": "3lc", "sparsity": 1.5, "measure_link": False}
LOSSLESS: dict[str, Any] = {"codec": "fp32", "measure_link": False}
RANKS: dict[str, Any] = {
    "fsdp": [0, 1, 2, 3],
    "three": [0, 1, 2],
    "descending": [2, 3, 1, 0],
    "hsdp": [[0, 1], [2, 3]],
    "descending sites": [[3, 1], [2, 0]],
    "crossed": [[0, 1], [3, 2]],
    "wide": [[0, 1, 2, 3]],
    "alone": [[0], [1], [2], [3]],
}
"""Ranks of each mesh; two dimensions are replicas and shards."""


@cache
def mesh(kind: str) -> DeviceMesh:
    """Every rank makes every mesh, once."""
    ranks = RANKS[kind]
    return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard") if isinstance(ranks[0], list) else None)


def sharded(kind: str, seed: int = 0, **options: Any) -> Any:
    """A model of three parameter groups; rows do not divide evenly."""
    model: Any = mlp(seed)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh(kind), **options)
    return fully_shard(model, mesh=mesh(kind), **options)


def whole(model: nn.Module) -> Weights:
    """The whole parameters, from this rank's replica."""
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters() if isinstance(p, DTensor)}


def run(rank: int, kind: str, options: Mapping[str, Any] | None, steps: int = 4, **wrap: Any) -> Weights:
    """Trains with FSDP2, compressed where there are options; returns the weights."""
    model = sharded(kind, **wrap)
    if options is not None:
        fsdp.compress(model, **options)
    train(model, rank, steps)
    return whole(model)


class Break(torch.autograd.Function):
    """Raises in the backward pass while `on`."""

    on = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Break.on:
            raise ValueError("broken off")
        return gradient


class Layers(nn.Module):
    """Three layers; the second can be skipped, and the first two run again in the backward pass, or break it off."""

    def __init__(self, outputs: int = 6) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = nn.Linear(12, 40), nn.Linear(40, 40), nn.Linear(40, outputs)

    def forward(self, x: torch.Tensor, *, recomputes: bool = False, skips: bool = False) -> torch.Tensor:
        for layer in [self.first] if skips else [self.first, self.second]:
            x = checkpoint(layer, x, use_reentrant=True) if recomputes else layer(x)
        found: torch.Tensor = self.last(Break.apply(x))  # type: ignore[no-untyped-call]
        return found


def sharded_layers(kind: str, *, root: bool = True, outputs: int = 6, frozen: bool = False, **options: Any) -> Any:
    """`Layers`, each a parameter group; all but the last may be frozen."""
    model = Layers(outputs)
    if frozen:
        model.requires_grad_(False)
        model.last.requires_grad_(True)
    for layer in (model.first, model.second, model.last):
        fully_shard(layer, mesh=mesh(kind), **options)
    return fully_shard(model, mesh=mesh(kind), **options) if root else model


def gradients(model: nn.Module, rank: int, step: int, *, to_none: bool = True, **passed: bool) -> Weights:
    """One backward pass's gradients, whole; the arguments are the model's."""
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * step + rank)).requires_grad_()
    model.zero_grad(set_to_none=to_none)
    model(x, **passed).pow(2).mean().backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}


def alike(rank: int, make: Callable[[bool], Any], steps: int = 3, **passed: bool) -> bool:
    """Whether each step's gradients are those of the model without a hook; late ones would show in its zeros."""
    plain, ours = make(False), make(True)
    for step in range(steps):
        wanted, found = (gradients(model, rank, step, to_none=False, **passed) for model in (plain, ours))
        if wanted.keys() != found.keys():
            return False
        if not all(torch.allclose(found[name], wanted[name], rtol=1e-5, atol=1e-7) for name in wanted):
            return False
    return True
