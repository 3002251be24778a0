"""One rank of a measured FSDP2 training: a plain loop, sharded as FSDP or HSDP, with `fsdp.compress` or without."""

from __future__ import annotations

import time
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from thinwire.hooks import fsdp
from thinwire.policies.naming import parse_name
from thinwire_lab.bench.fsdp_cells import RANKS, SITES, FsdpRank, Scored
from thinwire_lab.bench.groups import join
from thinwire_lab.bench.harness import Stage
from thinwire_lab.bench.rank_events import SILENCE_S, STOPPED, WARM, Gates, Stepped, Stopped, Warm
from thinwire_lab.workloads.evaluate import evaluate
from thinwire_lab.workloads.recipe import build_optimizer
from thinwire_lab.workloads.training import training


def train(role: FsdpRank, stage: Stage) -> None:
    """Trains as one rank."""
    cell, gates = role.cell, Gates(role.gate)
    join(role.master, rank=role.rank, ranks=RANKS, silence_s=SILENCE_S)
    made = training(cell.recipe(), data=cell.data, rank=role.rank, workers=RANKS, seed=cell.seed)
    state = shard(made.model, cell.kind, cell.method, seed=cell.seed)
    optimizer = build_optimizer(made.model, made.recipe)  # sharding has put other parameters in place

    def step() -> None:
        optimizer.zero_grad()
        made.backward()
        optimizer.step()

    for _ in range(cell.warmup):
        step()
    dist.barrier()
    stage.report(Warm())
    gates.wait(WARM)
    dist.barrier()
    began = time.perf_counter()
    for number in range(cell.timed):
        step()
        if role.rank == 0:
            stage.report(Stepped(step=number + 1, seconds=time.perf_counter() - began))
    report = "" if state is None else str(fsdp.report(state))
    stage.report(Stopped())
    gates.wait(STOPPED)
    for _ in range(cell.steps - cell.timed - cell.warmup):
        step()
    score = evaluate(made.model, made.dataset)  # by all ranks: a forward pass gathers parameters
    stage.report(Scored(accuracy=score.accuracy, loss=score.loss, report=report))
    dist.barrier()
    dist.destroy_process_group()


def shard(module: nn.Module, kind: str, method: str, *, seed: int) -> fsdp.ShardedState | None:
    """Shards every layer that has parameters of its own, and the rest together; compresses what is exchanged.

    Args:
        module: to shard, among all ranks.
        kind, method, seed: see `FsdpCell`.
    """
    ranks = torch.arange(dist.get_world_size())
    if kind == "hsdp":
        mesh = DeviceMesh("cpu", ranks.view(SITES, -1), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = DeviceMesh("cpu", ranks)
    held = Counter(id(each) for _, each in module.named_parameters(remove_duplicate=False))
    tied = {each for each, times in held.items() if times > 1}  # these stay with the whole model
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and not tied.intersection(map(id, layer.parameters())):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    codec, options = parse_name(method, "codec", short={"s": "sparsity"})
    if codec == "none":
        return None
    return fsdp.compress(module, codec, seed=seed, **options)
