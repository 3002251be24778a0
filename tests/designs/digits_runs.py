"""One training on the digits through server and workers, and what there is to say of it: for the bars.

Nothing here depends on time or on threads: in lockstep, one thread can play all workers in turn, unless inside a step
all wait for all. Runs are kept, so that several tests may speak of one.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

import thinwire as tw
from thinwire.policies.designs import Design
from thinwire.policies.designs import design as find_design
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.memory import MemoryServer
from thinwire_lab.workloads.batches import Batches
from thinwire_lab.workloads.data import data
from thinwire_lab.workloads.evaluate import cross_entropy, evaluate
from thinwire_lab.workloads.models import model as make_model
from thinwire_lab.workloads.recipe import build_optimizer, schedule
from thinwire_lab.workloads.recipes import recipe

torch.set_num_threads(1)

WORKERS = 4
MATRICES = 17_024
VECTORS = 202


@dataclass(frozen=True)
class Outcome:
    """One run: percent of the test set at workers and server, bits a compressed value each way, lag, difference."""

    accuracy: float
    server_accuracy: float
    bits_up: float
    bits_down: float
    lag: float
    residual_error: float


@functools.cache
def train(design: str, *, steps: int, seed: int = 0) -> Outcome:
    """Trains the digits' network."""
    chosen: Design = find_design(design)
    if not chosen.share_scales:
        chosen = replace(chosen, transmission="wait-free")
    plan = replace(recipe("mlp", "digits", design=design), steps=steps)
    dataset = data("digits")
    torch.manual_seed(seed)
    server = MemoryServer(serving(core := ServerCore()))
    workers = []
    for rank in range(WORKERS):
        model = make_model("mlp", num_classes=10, in_shape=dataset.in_shape, seed=seed)
        opt = tw.distribute(
            model,
            build_optimizer(model, plan),
            server=server.connect(),
            rank=rank,
            workers=WORKERS,
            design=chosen,
            seed=seed,
        )
        batches = Batches(dataset, rank=rank, workers=WORKERS, batch=plan.batch, seed=seed)
        workers.append((model, opt, batches))

    def take_step(rank: int, step: int) -> None:
        model, opt, batches = workers[rank]
        for group in opt.param_groups:
            group["lr"] = schedule(plan, step / steps)
        inputs, targets = next(batches)
        opt.zero_grad()
        cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        opt.step()

    def take_all_steps(rank: int) -> None:
        for step in range(steps):
            take_step(rank, step)

    if chosen.transmission == "traditional":  # inside a step all wait for all
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(take_all_steps, range(WORKERS)))
    else:
        for step in range(steps):
            for rank in range(WORKERS):
                take_step(rank, step)
    for _, opt, _ in workers:
        opt.sync()
    model, opt, _ = workers[0]
    traffic = [other.traffic() for _, other, _ in workers]
    lag = max(opt.residual_ratios().values(), default=0.0)
    accuracy = 100 * evaluate(model, dataset).accuracy
    error, server_accuracy = compare_with_server(model, core, chosen, accuracy, dataset)
    for _, other, _ in workers:
        other.close()
    server.stop()
    return Outcome(
        accuracy=accuracy,
        server_accuracy=server_accuracy,
        bits_up=bits(traffic, "push"),
        bits_down=bits(traffic, "pull"),
        lag=lag,
        residual_error=error,
    )


def compare_with_server(
    model: torch.nn.Module, core: ServerCore, design: Design, accuracy: float, dataset: Any
) -> tuple[float, float]:
    """The error of server − model = unsent, and the accuracy of the server's copy."""
    if design.downlink != "delta":
        return 0.0, accuracy
    tables = {table.spec.name: table for table in core.tables}
    error = 0.0
    other = make_model("mlp", num_classes=10, in_shape=dataset.in_shape, seed=0)
    with torch.no_grad():
        for (name, held), copy in zip(model.named_parameters(), other.parameters(), strict=True):
            values = tables[name].values
            unsent = torch.from_numpy(tables[name].residual)
            error = max(error, float((values - held - unsent).abs().max()))
            copy.copy_(values)
    return error, 100 * evaluate(other, dataset).accuracy


def bits(traffic: list[dict[str, float]], way: str) -> float:
    """Payload bits a value of the matrices; the vectors, which travel as they are, are taken out."""
    steps = sum(each[f"values_{way}"] for each in traffic) / (MATRICES + VECTORS)
    payload = 8 * sum(each[f"payload_bytes_{way}"] for each in traffic)
    return (payload - 32 * VECTORS * steps) / (MATRICES * steps)
