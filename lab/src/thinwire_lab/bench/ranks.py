"""One rank of a measurement: the training loop of each kind of cell.

`play` finds the loop of a role. Each loop joins the process group on one thread, trains, and reports. A hook's loop
exchanges what a design of local updates has left at the last step, on the clock.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.extras import LazyModule
from thinwire.hooks.distribute import distribute
from thinwire_lab.bench.cells import (
    DDP,
    EXCHANGED,
    FSDP_RANKS,
    FSDP_WARMUP,
    OTHERS,
    SHARD,
    STATUS,
    TASKS,
    TRAINING,
    BlockEnded,
    Counted,
    Ended,
    FsdpRank,
    Held,
    HookCell,
    HookRank,
    MemoryCell,
    MemoryRank,
    Rank,
    Scored,
    Spent,
    UpdatesRank,
)
from thinwire_lab.bench.methods import Distributed, Hooked, Method
from thinwire_lab.bench.names import ALONE, POWERSGD, SHARDED, hook
from thinwire_lab.bench.roles import SILENCE_S, STOPPED, WARM, Gates, Stage, Stepped, Stopped, Warm, join
from thinwire_lab.jobs.devices import wait_for
from thinwire_lab.jobs.training_loop import weights_digest
from thinwire_lab.workloads.dataset import Dataset
from thinwire_lab.workloads.evaluate import evaluate
from thinwire_lab.workloads.recipe import build_optimizer, schedule
from thinwire_lab.workloads.training import Training, training

if TYPE_CHECKING:
    from thinwire_lab.bench import sharding
else:
    sharding = LazyModule("thinwire_lab.bench.sharding")

_ALONE_STEPS = 6
"""Steps without any exchange, for the CPU time of computation; the first is not counted."""
_WIDTH = 1024
"""Of the linear layers whose memory is measured: a million parameters each."""
_MMAP_THRESHOLD, _MMAP_NBYTES = -3, 128 * 1024  # malloc.h
_SETTLE_S = 0.05
"""After a barrier: other ranks may still be taking their last answers."""


def play(role: Rank, stage: Stage) -> None:
    """Trains as one rank."""
    loop, ranks = _LOOPS[type(role)]
    join(role.master, rank=role.rank, ranks=ranks or role.cell.ranks, silence_s=SILENCE_S)  # type: ignore[attr-defined]
    loop(role, stage)
    dist.destroy_process_group()


# ---- with a hook


def train(role: HookRank, stage: Stage) -> None:
    """Trains with a hook, or a design, and reports each step of rank 0."""
    cell, rank, report, gates = role.cell, role.rank, stage.report, Gates(role.gate)
    made = training(
        cell.recipe(),
        data=cell.data,
        rank=rank,
        workers=cell.ranks,
        seed=cell.seed,
        data_root=cell.data_root,
        device=torch.device(cell.device),
    )
    tested = _held_out(made.dataset, cell)
    dist.barrier()
    alone = _cpu_alone(made.copy())
    design = hook(cell.hook).design
    if design is not None:
        method: Method = Distributed(made.model, made.optimizer, design, cell.seed, role.server)
    else:
        method = Hooked(made.model, made.optimizer, cell)
    step = _training(made, method)
    for number in range(cell.warmup):
        step(number)
    dist.barrier()
    report(Warm())
    gates.wait(WARM)
    dist.barrier()
    seconds: list[float] = []
    cpu = exchange = 0.0
    for number in range(cell.steps):
        began, used, exchanged = time.perf_counter(), time.process_time(), method.exchange_seconds or 0.0
        step(cell.warmup + number)
        last = number + 1 == cell.steps
        if last:
            method.finish()
            wait_for(made.device)
        seconds.append(time.perf_counter() - began)
        cpu += time.process_time() - used
        exchange += (method.exchange_seconds or 0.0) - exchanged
        if rank == 0:
            report(Stepped(step=number + 1, seconds=sum(seconds)))
        if last or (cell.eval_every and (number + 1) % cell.eval_every == 0):
            scored = _score(made.model, method, tested, number + 1, sum(seconds)) if rank == 0 else None
            if scored is not None:
                report(scored)
            if _enough(cell, 0.0 if scored is None else scored.accuracy):
                if not last:
                    method.finish()
                break
    report(Stopped())
    gates.wait(STOPPED)
    report(
        Ended(
            cpu_seconds=cpu,
            cpu_seconds_alone=alone,
            exchange_seconds=None if method.exchange_seconds is None else exchange,
            weights=weights_digest(made.model),
            report=method.report(),
        )
    )
    method.close()


def _score(module: nn.Module, method: Method, tested: Dataset, step: int, seconds: float) -> Scored:
    """Evaluates the parameters that all ranks share."""
    with method.shared_weights():
        score = evaluate(module, tested)
    scored = Scored(step=step, seconds=seconds, accuracy=score.accuracy)
    return scored if tested.task != "bytes" else msgspec.structs.replace(scored, loss=score.loss)


def _held_out(dataset: Dataset, cell: HookCell) -> Dataset:
    """The examples to score on: the first of the test set, or of text evenly spaced ones, for its files differ."""
    count = len(dataset.test_x) if cell.eval_examples is None else min(cell.eval_examples, len(dataset.test_x))
    rows = torch.arange(count)
    if dataset.task == "bytes":
        rows = rows * len(dataset.test_x) // count
    return replace(dataset, test_x=dataset.test_x[rows], test_y=dataset.test_y[rows])


def _training(made: Training, method: Method) -> Callable[[int], None]:
    """Returns one step of training, to be called with its number."""

    def step(number: int) -> None:
        for group in method.optimizer.param_groups:
            group["lr"] = schedule(made.recipe, number / made.recipe.steps)
        method.optimizer.zero_grad()
        made.backward(through=method.model, clips=method.clips)
        method.step()
        wait_for(made.device)

    return step


def _cpu_alone(made: Training) -> float:
    """CPU seconds of a step in which nothing is exchanged, beside other ranks that are as busy."""
    step = _training(made, Method(made.model, made.optimizer))
    step(0)
    used = time.process_time()
    for _ in range(_ALONE_STEPS - 1):
        step(0)
    return (time.process_time() - used) / (_ALONE_STEPS - 1)


def _enough(cell: HookCell, score: float) -> bool:
    """Whether all ranks stop here: rank 0 has scored the model, off the clock, and the others waited."""
    enough = torch.tensor([float(cell.target is not None and score >= cell.target)])
    dist.broadcast(enough, 0)
    return bool(enough.item())


# ---- sharded


def train_sharded(role: FsdpRank, stage: Stage) -> None:
    """Trains as FSDP or HSDP: the timed steps behind gates, and the rest of the training after them."""
    cell, gates = role.cell, Gates(role.gate)
    made = training(cell.recipe(), data=cell.data, rank=role.rank, workers=FSDP_RANKS, seed=cell.seed)
    state = sharding.shard(made.model, cell.kind, cell.method, seed=cell.seed)
    optimizer = build_optimizer(made.model, made.recipe)  # sharding has put other parameters in place

    def step() -> None:
        optimizer.zero_grad()
        made.backward()
        optimizer.step()

    for _ in range(FSDP_WARMUP):
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
    took, report = time.perf_counter() - began, sharding.report(state)
    stage.report(Stopped())
    gates.wait(STOPPED)
    for _ in range(cell.steps - cell.timed - FSDP_WARMUP):
        step()
    score = evaluate(made.model, made.dataset)  # by all ranks: a forward pass gathers parameters
    stage.report(Scored(step=cell.steps, seconds=took, accuracy=score.accuracy, loss=score.loss, report=report))
    dist.barrier()


# ---- for their memory


def hold(role: MemoryRank, stage: Stage) -> None:
    """Trains linear layers under AdamW, and reports what its process holds."""
    cell = role.cell
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_THRESHOLD, _MMAP_NBYTES)  # glibc gives freed tensors back to the system, and keeps none
    torch.manual_seed(cell.seed)
    device = torch.device(cell.device)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(role.layers))).to(device)
    numel = sum(each.numel() for each in model.parameters())
    method = _method(cell, model)
    inputs = torch.Generator().manual_seed(cell.seed + role.rank)
    for _ in range(cell.steps):
        method.optimizer.zero_grad()
        method.model(torch.randn(1, _WIDTH, generator=inputs).to(device)).square().mean().backward()
        method.step()
    dist.barrier()
    stage.report(_held(numel, device))
    method.finish()
    dist.barrier()
    method.close()


def _method(cell: MemoryCell, model: nn.Module) -> Method:
    if cell.method.startswith(SHARDED):
        kind, _, codec = cell.method.partition(":")
        sharding.shard(model, kind, codec, seed=cell.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if cell.method == ALONE or cell.method.startswith(SHARDED):
        return Method(model, optimizer)
    design = hook(cell.method).design
    if design is not None:
        return Distributed(model, optimizer, design, cell.seed)
    one_bucket = 1_000_000 if cell.method.startswith(POWERSGD) else None  # with more it aborts, or hangs, on gloo
    hooked = HookCell(hook=cell.method, model="mlp", data="digits", seed=cell.seed, bucket_cap_mb=one_bucket)
    return Hooked(model, optimizer, hooked)


def _held(numel: int, device: torch.device) -> Held:
    if device.type == "cpu":
        return Held(numel=numel, held=_nbytes("RssAnon"), peak=_nbytes("VmHWM"))
    wait_for(device)
    # The system does not count pinned memory as the process's; an old torch does not tell it.
    stats = getattr(torch.cuda, "host_memory_stats", None)
    pinned = 0 if stats is None else stats().get("allocated_bytes.current", 0)
    return Held(
        numel=numel,
        held=torch.cuda.memory_allocated(device),
        peak=torch.cuda.max_memory_allocated(device),
        host=_nbytes("RssAnon") + int(pinned),
    )


def _nbytes(name: str) -> int:
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


# ---- for their processor time


def count(role: UpdatesRank, stage: Stage) -> None:
    """Trains alone, with plain DDP and with a design, in blocks in turn; the first of each is not counted."""
    cell = role.cell
    own = training(cell.recipe(), data=cell.data, rank=role.rank, workers=cell.ranks, seed=cell.seed)
    alone, stock = own.copy(), own.copy()
    examples = list(islice(alone.batches, 40))

    def steps_of(made: Training, optimizer: Any, through: nn.Module | None = None) -> Callable[[int], None]:
        turn = cycle(examples)

        def steps(count: int) -> None:
            for batch in islice(turn, count):
                optimizer.zero_grad()
                made.backward(batch, through=through)
                optimizer.step()
            if hasattr(optimizer, "sync"):
                optimizer.sync()
            dist.barrier()
            time.sleep(_SETTLE_S)

        return steps

    optimizer = distribute(own.model, own.optimizer, group=dist.group.WORLD, design=cell.design)
    ways = {
        ALONE: steps_of(alone, alone.optimizer),
        DDP: steps_of(stock, stock.optimizer, through=DistributedDataParallel(stock.model)),
        EXCHANGED: steps_of(own, optimizer),
    }
    blocks: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(cell.blocks + 1):
        for way, steps in ways.items():
            steps(cell.warm_up)
            before = cpu_ms()
            steps(cell.steps)
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
        kind = TRAINING if name == "MainThread" else SHARD if name.startswith("thinwire-") else OTHERS
        spent[kind] += nanoseconds / 1e6
    return spent


_LOOPS: dict[type[Rank], tuple[Callable[[Any, Stage], None], int | None]] = {
    HookRank: (train, None),
    FsdpRank: (train_sharded, FSDP_RANKS),
    MemoryRank: (hold, None),
    UpdatesRank: (count, None),
}
"""The loop of each role, and how many ranks it has where no cell says so."""
