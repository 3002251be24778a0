"""One rank of a measurement: the training loop of each kind of cell."""

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
from thinwire_lab.bench.cells import (
    SILENCE_S,
    STATUS,
    STOPPED,
    WARM,
    Ended,
    Gates,
    Held,
    HookCell,
    HookRank,
    MemoryRank,
    Scored,
    Stepped,
    Stopped,
    Warm,
)
from thinwire_lab.bench.decoupled.learner import LearnerRank, play
from thinwire_lab.bench.methods import Method
from thinwire_lab.bench.methods import method as find_method
from thinwire_lab.workloads.dataset import Dataset
from thinwire_lab.workloads.evaluate import evaluate
from thinwire_lab.workloads.recipe import build_optimizer, schedule
from thinwire_lab.workloads.training import Training, training

AnyRank = HookRank | MemoryRank | LearnerRank
Report = Callable[[Event], None]

_ALONE_STEPS = 6
"""Steps without any exchange, for the CPU time of computation; the first does not count."""
_WIDTH = 1024
"""Width of the linear layers in memory measurements: a million parameters each."""
_MMAP_THRESHOLD, _MMAP_NBYTES = -3, 128 * 1024  # malloc.h


def run(role: AnyRank, report: Report) -> None:
    """Trains as a learner; or joins the process group of all ranks, on one thread, and trains as one of them."""
    if isinstance(role, LearnerRank):
        play(role, report)
        return
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
        measure_memory(role, report)
    dist.destroy_process_group()


def train(role: HookRank, report: Report) -> None:
    """Trains with a hook, or a design, or sharded, and reports each step of rank 0."""
    cell, rank, gates = role.cell, role.rank, Gates(role.gate)
    made = training(
        cell.recipe(),
        data=cell.data,
        rank=rank,
        workers=cell.ranks,
        seed=cell.seed,
        device=torch.device(cell.device),
    )
    tested = held_out(made.dataset, cell.eval_examples)
    dist.barrier()
    alone = _cpu_alone(made.copy())
    method = find_method(cell.hook, made.model, partial(build_optimizer, recipe=made.recipe), cell.seed, role.server)
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
            made.wait()
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
    """Evaluates the ranks' common parameters."""
    with method.shared_weights():
        score = evaluate(module, tested)
    scored = Scored(step=step, seconds=seconds, accuracy=score.accuracy)
    return scored if tested.task != "bytes" else msgspec.structs.replace(scored, loss=score.loss)


def held_out(dataset: Dataset, most: int | None) -> Dataset:
    """Returns some test examples: the first ones, or windows of text at equal distances, for its files differ."""
    count = len(dataset.test_x) if most is None else min(most, len(dataset.test_x))
    rows = torch.arange(count)
    if dataset.task == "bytes":
        rows = rows * len(dataset.test_x) // count
    return replace(dataset, test_x=dataset.test_x[rows], test_y=dataset.test_y[rows])


def _training(made: Training, method: Method) -> Callable[[int], None]:
    """Returns a function that takes the step with a number."""

    def step(number: int) -> None:
        for group in method.optimizer.param_groups:
            group["lr"] = schedule(made.recipe, number / made.recipe.steps)
        method.optimizer.zero_grad()
        made.backward(through=method.model, clips=method.clips)
        method.step()
        made.wait()

    return step


def _cpu_alone(made: Training) -> float:
    """Returns the CPU seconds of a step without any exchange, while other ranks are as busy."""
    step = _training(made, Method(made.model, made.optimizer))
    step(0)
    used = time.process_time()
    for _ in range(_ALONE_STEPS - 1):
        step(0)
    return (time.process_time() - used) / (_ALONE_STEPS - 1)


def _enough(cell: HookCell, score: float) -> bool:
    """Returns whether all ranks stop, by rank 0's score; the other ranks wait for it."""
    enough = torch.tensor([float(cell.target is not None and score >= cell.target)])
    dist.broadcast(enough, 0)
    return bool(enough.item())


def measure_memory(role: MemoryRank, report: Report) -> None:
    """Trains linear layers with AdamW, and reports the memory of its process."""
    cell = role.cell
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_THRESHOLD, _MMAP_NBYTES)  # glibc returns freed tensors to the system
    torch.manual_seed(cell.seed)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(role.layers)))
    numel = sum(each.numel() for each in model.parameters())
    method = find_method(cell.method, model, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4), cell.seed)
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


def _nbytes(name: str) -> int:
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])
