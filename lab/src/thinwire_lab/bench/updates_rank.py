"""One rank of a measurement of local updates: blocks of steps alone, with plain DDP and with the design, in turn."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.hooks.distribute import DistributedOptimizer, distribute
from thinwire_lab.bench.groups import join
from thinwire_lab.bench.harness import Stage
from thinwire_lab.bench.rank_events import SILENCE_S
from thinwire_lab.bench.updates_cells import (
    ALONE,
    DDP,
    EXCHANGED,
    OTHERS,
    SHARD,
    TRAINING,
    BlockEnded,
    Counted,
    Spent,
    UpdatesRank,
)
from thinwire_lab.jobs.training_loop import weights_digest
from thinwire_lab.workloads.training import Training, training

TASKS = Path("/proc/self/task")
_SETTLE_S = 0.05
"""Other ranks may still be taking the last answers when this one has."""
_BATCHES = 40


def train(role: UpdatesRank, stage: Stage) -> None:
    """Trains as one rank; the first block is not counted."""
    cell = role.cell
    join(role.master, rank=role.rank, ranks=cell.ranks, silence_s=SILENCE_S)
    own = training(cell.recipe(), data=cell.data, rank=role.rank, workers=cell.ranks, seed=cell.seed)
    alone, stock = own.copy(), own.copy()
    examples = list(islice(alone.batches, _BATCHES))

    def steps_of(
        made: Training, optimizer: torch.optim.Optimizer | DistributedOptimizer, through: nn.Module | None = None
    ) -> Callable[[int], None]:
        turn = cycle(examples)

        def steps(count: int) -> None:
            for batch in islice(turn, count):
                optimizer.zero_grad()
                made.backward(batch, through=through)
                optimizer.step()
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.sync()

        return steps

    hooked = DistributedDataParallel(stock.model)
    optimizer = distribute(own.model, own.optimizer, group=dist.group.WORLD, design=cell.design)
    ways = {
        ALONE: steps_of(alone, alone.optimizer),
        DDP: steps_of(stock, stock.optimizer, through=hooked),
        EXCHANGED: steps_of(own, optimizer),
    }
    blocks: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(cell.blocks + 1):
        for way, steps in ways.items():
            steps(cell.warm_up)
            dist.barrier()
            time.sleep(_SETTLE_S)
            before = cpu_ms()
            steps(cell.steps)
            dist.barrier()
            time.sleep(_SETTLE_S)
            after = cpu_ms()
            if number:
                blocks[way].append({name: (after[name] - before[name]) / cell.steps for name in after})
        if role.rank == 0:
            stage.report(BlockEnded(number=number))
    optimizer.flush()
    spent: Spent = {
        way: {name: statistics.median(block[name] for block in some) for name in some[0]}
        for way, some in blocks.items()
    }
    stage.report(Counted(spent=spent, weights=weights_digest(own.model)))
    dist.barrier()
    optimizer.close()
    dist.destroy_process_group()


def cpu_ms() -> dict[str, float]:
    """Returns the CPU milliseconds of this process's threads so far, as Linux counts them."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    spent = {TRAINING: 0.0, SHARD: 0.0, OTHERS: 0.0}
    for task in TASKS.iterdir():
        try:
            nanoseconds = int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:  # it has ended
            continue
        name = names.get(int(task.name), "")
        kind = TRAINING if name == "MainThread" else SHARD if name.startswith("thinwire-serve") else OTHERS
        spent[kind] += nanoseconds / 1e6
    return spent
