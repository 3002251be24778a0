"""One rank of a measured FSDP2 training: a plain loop, sharded as FSDP or HSDP, with `fsdp.compress` or without."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from thinwire.bench.fsdp_cells import RANKS, SITES, Cell, FsdpRank, Scored
from thinwire.bench.groups import join
from thinwire.bench.harness import Stage
from thinwire.bench.hook_rank import SILENCE_S, Stepped, Stopped, Warm, wait_for
from thinwire.hooks import fsdp
from thinwire.policies.naming import parse_name
from thinwire.workloads.batches import Batches
from thinwire.workloads.data import data
from thinwire.workloads.evaluate import evaluate
from thinwire.workloads.models import model as make_model
from thinwire.workloads.recipe import build_optimizer
from thinwire.workloads.recipes import recipe


def train(role: FsdpRank, stage: Stage) -> None:
    """Trains as one rank."""
    cell, gate = role.cell, Path(role.gate)
    join(role.master, rank=role.rank, ranks=RANKS, silence_s=SILENCE_S)
    dataset = data(cell.data)
    found = recipe(cell.model, cell.data)
    module = make_model(cell.model, num_classes=dataset.num_classes, in_shape=dataset.in_shape, seed=cell.seed)
    state = shard(module, cell)
    optimizer = build_optimizer(module, found)
    for group in optimizer.param_groups:
        group["lr"] = cell.lr
    batches = Batches(dataset, rank=role.rank, workers=RANKS, batch=cell.batch, seed=cell.seed)

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(cell.warmup):
        step()
    dist.barrier()
    stage.report(Warm())
    wait_for(gate / "warm")
    dist.barrier()
    began = time.perf_counter()
    for number in range(cell.timed):
        step()
        if role.rank == 0:
            stage.report(Stepped(step=number + 1, seconds=time.perf_counter() - began))
    report = "" if state is None else str(fsdp.report(state))
    stage.report(Stopped())
    wait_for(gate / "stopped")
    for _ in range(cell.steps - cell.timed - cell.warmup):
        step()
    score = evaluate(module, dataset)  # by all ranks: a forward pass gathers parameters
    stage.report(Scored(accuracy=score.accuracy, loss=score.loss, report=report))
    dist.barrier()
    dist.destroy_process_group()


def shard(module: nn.Module, cell: Cell) -> fsdp.ShardedState | None:
    """Shards every layer and compresses what is exchanged."""
    ranks = torch.arange(RANKS)
    if cell.kind == "hsdp":
        mesh = DeviceMesh("cpu", ranks.view(SITES, -1), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = DeviceMesh("cpu", ranks)
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    codec, options = parse_name(cell.method, "codec", short={"s": "sparsity"})
    if codec == "none":
        return None
    return fsdp.compress(module, codec, seed=cell.seed, **options)
