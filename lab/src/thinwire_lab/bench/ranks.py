"""One rank of a measurement: the training loop of each kind of cell.

A loop trains and reports. A hook's loop exchanges what a design of local updates has left at the last step, on the
clock.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from thinwire.engines.events import Event
from thinwire_lab.bench.cells import STATUS, Ended, Held, HookCell, HookRank, MemoryCell, MemoryRank, Scored
from thinwire_lab.bench.methods import Distributed, Hooked, Method, Sharded
from thinwire_lab.bench.names import POWERSGD, SHARDED, hook
from thinwire_lab.bench.options import ALONE
from thinwire_lab.bench.roles import SILENCE_S, STOPPED, WARM, Gates, Rank, Stepped, Stopped, Warm
from thinwire_lab.jobs.devices import wait_for
from thinwire_lab.workloads.dataset import Dataset
from thinwire_lab.workloads.evaluate import evaluate
from thinwire_lab.workloads.recipe import build_optimizer, schedule
from thinwire_lab.workloads.training import Training, training

Report = Callable[[Event], None]

_ALONE_STEPS = 6
"""Steps without any exchange, for the CPU time of computation; the first is not counted."""
_WIDTH = 1024
"""Of the linear layers whose memory is measured: a million parameters each."""
_MMAP_THRESHOLD, _MMAP_NBYTES = -3, 128 * 1024  # malloc.h


def play(role: Rank, report: Report) -> None:
    """Joins the process group of all ranks, on one thread, and trains as one of them."""
    assert isinstance(role, HookRank | MemoryRank)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{role.master}",
        rank=role.rank,
        world_size=role.cell.ranks,
        timeout=timedelta(seconds=SILENCE_S),
    )
    if isinstance(role, HookRank):
        train(role, report)
    else:
        hold(role, report)
    dist.destroy_process_group()


# ---- with a hook


def train(role: HookRank, report: Report) -> None:
    """Trains with a hook, or a design, or sharded, and reports each step of rank 0."""
    cell, rank, gates = role.cell, role.rank, Gates(role.gate)
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
    named = hook(cell.hook)
    if named.sharded is not None:
        method: Method = Sharded(made.model, partial(build_optimizer, recipe=made.recipe), cell.hook, cell.seed)
    elif named.design is not None:
        method = Distributed(made.model, made.optimizer, named.design, cell.seed, role.server)
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
            scored = None
            if rank == 0 or method.together:
                scored = _score(made.model, method, tested, number + 1, sum(seconds))
            if scored is not None and rank == 0:
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
            weights=method.weights(),
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


# ---- for their memory


def hold(role: MemoryRank, report: Report) -> None:
    """Trains linear layers under AdamW, and reports what its process holds."""
    cell = role.cell
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_THRESHOLD, _MMAP_NBYTES)  # glibc gives freed tensors back to the system, and keeps none
    torch.manual_seed(cell.seed)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(role.layers)))
    numel = sum(each.numel() for each in model.parameters())
    method = _method(cell, model)
    inputs = torch.Generator().manual_seed(cell.seed + role.rank)
    for _ in range(cell.steps):
        method.optimizer.zero_grad()
        method.model(torch.randn(1, _WIDTH, generator=inputs)).square().mean().backward()
        method.step()
    dist.barrier()
    report(Held(numel=numel, held=_nbytes("RssAnon"), peak=_nbytes("VmHWM")))
    method.finish()
    dist.barrier()
    method.close()


def _method(cell: MemoryCell, model: nn.Module) -> Method:
    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    if cell.method.startswith(SHARDED):
        return Sharded(model, adamw, cell.method, cell.seed)
    optimizer = adamw(model)
    if cell.method == ALONE:
        return Method(model, optimizer)
    design = hook(cell.method).design
    if design is not None:
        return Distributed(model, optimizer, design, cell.seed)
    one_bucket = 1_000_000 if cell.method.startswith(POWERSGD) else None  # with more it aborts, or hangs, on gloo
    hooked = HookCell(hook=cell.method, model="mlp", data="digits", seed=cell.seed, bucket_cap_mb=one_bucket)
    return Hooked(model, optimizer, hooked)


def _nbytes(name: str) -> int:
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])
