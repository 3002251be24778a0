"""One rank of a measured DDP hook: a plain training loop, with whichever hook is being measured.

Designs of local updates and other people's optimizers train in the same loop, without DDP. What they have not exchanged
at the last step is exchanged on the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from thinwire_lab.bench.groups import join
from thinwire_lab.bench.harness import Stage
from thinwire_lab.bench.hook_cells import Ended, HookCell, HookRank, Scored, hook
from thinwire_lab.bench.methods import Distributed, Hooked, Method
from thinwire_lab.bench.rank_events import SILENCE_S, STOPPED, WARM, Gates, Stepped, Stopped, Warm
from thinwire_lab.jobs.devices import wait_for
from thinwire_lab.jobs.training_loop import weights_digest
from thinwire_lab.workloads.dataset import Dataset
from thinwire_lab.workloads.evaluate import evaluate
from thinwire_lab.workloads.recipe import schedule
from thinwire_lab.workloads.training import Training, training

_ALONE_STEPS = 6
"""Steps without any exchange, for the CPU time of computation; the first is not counted."""


def train(role: HookRank, stage: Stage) -> None:
    """Trains as one rank."""
    cell, rank, report, gates = role.cell, role.rank, stage.report, Gates(role.gate)
    join(role.master, rank=rank, ranks=cell.ranks, silence_s=SILENCE_S)
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
    method = _method(role, made.model, made.optimizer)
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
    dist.destroy_process_group()


def _method(role: HookRank, module: nn.Module, optimizer: torch.optim.Optimizer) -> Method:
    """Puts the hook or the design in place."""
    cell, named = role.cell, hook(role.cell.hook)
    if named.design is not None:
        return Distributed(module, optimizer, named.design, cell.seed, role.server)
    return Hooked(module, optimizer, cell)


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
    """CPU seconds of a step in which nothing is exchanged, while the other ranks are as busy."""
    step = _training(made, Method(made.model, made.optimizer))
    step(0)
    used = time.process_time()
    for _ in range(_ALONE_STEPS - 1):
        step(0)
    return (time.process_time() - used) / (_ALONE_STEPS - 1)


def _enough(cell: HookCell, score: float) -> bool:
    """Whether everybody stops here: rank 0 has scored the model, off the clock, while the others waited."""
    enough = torch.tensor([float(cell.target is not None and score >= cell.target)])
    dist.broadcast(enough, 0)
    return bool(enough.item())
