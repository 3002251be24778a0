"""One rank of a measured FSDP2 training: a plain loop, sharded as FSDP or HSDP, with `fsdp.compress` or without."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from thinwire.bench.harness import Role, Stage
from thinwire.bench.hook_rank import SILENCE_S, Stepped, Stopped, Warm, wait_for
from thinwire.engines.events import Event
from thinwire.hooks import fsdp
from thinwire.policies.naming import parse_name
from thinwire.workloads.batches import Batches
from thinwire.workloads.data import data
from thinwire.workloads.evaluate import evaluate
from thinwire.workloads.models import model as make_model
from thinwire.workloads.recipes import build_optimizer, recipe

SITES, RANKS = 2, 4


@dataclass(frozen=True, slots=True)
class Cell:
    """One training.

    Args:
        kind: `hsdp`, two sites of two ranks, or `fsdp`, four ranks.
        method: `none` for stock FSDP2, or a codec with its options; `gather` among them codes the parameters.
        link: rate of every site's link, or of every rank's with `fsdp`; None for no limit.
        steps: of the whole training, which the loss comes from; all but the timed ones without a limit.
        timed: measured steps.
        warmup: steps before them.
    """

    kind: str
    method: str
    link: str | None
    model: str
    data: str
    steps: int
    timed: int
    batch: int
    lr: float
    seed: int
    warmup: int = 2

    @property
    def hosts(self) -> int:
        """How many links there are."""
        return SITES if self.kind == "hsdp" else RANKS

    def __str__(self) -> str:
        return f"{self.kind} {self.method}, {self.link or 'unlimited'}"


class Scored(Event, frozen=True, kw_only=True):
    """The trained model on the test set, and what `fsdp.report` says after the timed steps."""

    accuracy: float
    loss: float
    report: str


class FsdpRank(Role, frozen=True, kw_only=True):
    """One rank of a cell.

    Attributes:
        cell: what is measured.
        rank: this rank.
        master: host and port of rank 0.
        gate: a folder; the file `warm` in it starts the clock, `stopped` lets the rank train to the end.
    """

    cell: Cell
    rank: int
    master: str
    gate: str

    def play(self, stage: Stage) -> None:
        """Trains as one rank."""
        torch.set_num_threads(1)
        cell, gate = self.cell, Path(self.gate)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self.master}",
            rank=self.rank,
            world_size=RANKS,
            timeout=timedelta(seconds=SILENCE_S),
        )
        dataset = data(cell.data)
        found = recipe(cell.model, cell.data)
        module = make_model(cell.model, num_classes=dataset.num_classes, in_shape=dataset.in_shape, seed=cell.seed)
        state = shard(module, cell)
        optimizer = build_optimizer(module, found)
        for group in optimizer.param_groups:
            group["lr"] = cell.lr
        batches = Batches(dataset, rank=self.rank, workers=RANKS, batch=cell.batch, seed=cell.seed)

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
            if self.rank == 0:
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
