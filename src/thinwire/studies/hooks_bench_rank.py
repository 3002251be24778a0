"""One rank of `hooks_bench`: a plain DDP training loop, with whichever hook is being measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import EngineError
from thinwire.hooks import ddp
from thinwire.studies.hooks_bench import SILENCE_S, STOCK, Cell
from thinwire.studies.training import weights_digest
from thinwire.workloads.batches import Batches
from thinwire.workloads.data import data
from thinwire.workloads.evaluate import cross_entropy, evaluate
from thinwire.workloads.models import model as make_model
from thinwire.workloads.recipes import build_optimizer, recipe, schedule

POWERSGD_BUCKET_MB = 100
_POLL_S = 0.01
Report = Callable[[dict[str, Any]], None]


def run_rank(cell: Cell, *, rank: int, master: str, gate: Path, report: Report) -> None:
    """Trains as one rank, and reports `warm`, `progress`, `measured` and `outcome`.

    Args:
        cell: what is measured.
        rank: this rank.
        master: host and port of rank 0.
        gate: a folder; the file `warm` in it starts the clock, `measured` lets the rank go.
        report: where events go.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{master}",
        rank=rank,
        world_size=cell.ranks,
        timeout=timedelta(seconds=SILENCE_S),
    )
    found = recipe(cell.model, cell.data)
    found = replace(found, batch=cell.batch or found.batch, lr=cell.lr or found.lr, steps=cell.warmup + cell.steps)
    dataset = data(cell.data, root=cell.data_root)
    module = make_model(cell.model, num_classes=dataset.num_classes, in_shape=dataset.in_shape, seed=cell.seed)
    cap = cell.bucket_cap_mb or (POWERSGD_BUCKET_MB if cell.hook.startswith("powersgd") else None)
    model = DistributedDataParallel(module, bucket_cap_mb=cap)
    state = install(model, cell)
    optimizer = build_optimizer(module, found)
    batches = Batches(dataset, rank=rank, workers=cell.ranks, batch=found.batch, seed=cell.seed, augment=found.augment)

    def step(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = schedule(found, number / found.steps)
        x, y = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for number in range(cell.warmup):
        step(number)
    dist.barrier()
    report({"event": "warm", "rank": rank})
    _wait_for(gate / "warm")
    dist.barrier()
    seconds: list[float] = []
    curve: list[dict[str, float]] = []
    cpu = 0.0
    for number in range(cell.steps):
        began, used = time.perf_counter(), time.process_time()
        step(cell.warmup + number)
        seconds.append(time.perf_counter() - began)
        cpu += time.process_time() - used
        if rank == 0:
            report({"event": "progress", "step": number + 1, "steps": cell.steps, "seconds": sum(seconds)})
        last = number + 1 == cell.steps
        if (last or (cell.eval_every and (number + 1) % cell.eval_every == 0)) and _evaluated(
            cell, rank, module, dataset, sum(seconds), number + 1, curve
        ):
            break
    report({"event": "measured", "rank": rank})
    _wait_for(gate / "measured")
    report(
        {
            "event": "outcome",
            "rank": rank,
            "seconds": seconds,
            "cpu_seconds": cpu,
            "curve": curve,
            "weights": weights_digest(module),
            "report": "" if state is None else str(ddp.report(state)),
        }
    )
    dist.destroy_process_group()


def install(model: DistributedDataParallel, cell: Cell) -> ddp.ThinwireState | None:
    """Registers the cell's hook. Returns our state where it is ours."""
    if cell.hook not in STOCK:
        # The link is not thin yet: measuring it here would only mislead.
        return ddp.compress(model, cell.codec(), seed=cell.seed, measure_link=False)
    if cell.hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif cell.hook == "bf16":
        model.register_comm_hook(None, bf16_hook)
    elif cell.hook.startswith("powersgd-"):
        rank = int(cell.hook.removeprefix("powersgd-"))
        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return None


def bf16_hook(_state, bucket):  # type: ignore[no-untyped-def]
    """What torch's bf16 hook does, on gloo: DDP compares annotations with types, so there are none here."""
    buffer = bucket.buffer()
    narrow = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(narrow, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def _evaluated(
    cell: Cell, rank: int, module: Any, dataset: Any, seconds: float, step: int, curve: list[dict[str, float]]
) -> bool:
    """Rank 0 scores the model while the others wait, off the clock. Returns whether everybody stops here."""
    enough = torch.zeros(1)
    if rank == 0:
        accuracy = evaluate(module, dataset).accuracy
        curve.append({"step": step, "seconds": seconds, "accuracy": accuracy})
        enough[0] = float(cell.target is not None and accuracy >= cell.target)
    dist.broadcast(enough, 0)
    return bool(enough.item())


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + SILENCE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise EngineError(f"the launcher did not open the gate {path.name!r} within {SILENCE_S:g} s")
        time.sleep(_POLL_S)
