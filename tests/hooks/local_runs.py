"""Trainings for tests of local updates: small models on batches of a seed, and runs that resume."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import again, run_cluster, start_server
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.local_optimizer import LocalUpdateOptimizer
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.memory import MemoryServer

torch.set_num_threads(1)

Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]
Step = Callable[[nn.Module, Any, int, int], None]


def mlp(_rank: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40, bias=False), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))


def wide(_rank: int) -> nn.Module:
    """Its matrices are large enough for `blocktopk`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 3))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, (x[:, :3] + x[:, 3:6]).argmax(1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def inner_optimizer(design: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return sgd if design.startswith("demo") else adamw


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    x, y = batch(rank, step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    if isinstance(optimizer, LocalUpdateOptimizer) or not isinstance(optimizer, DistributedOptimizer):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of others gradients have left
    optimizer.step()


def values(model: nn.Module) -> torch.Tensor:
    tensors = [*model.parameters(), *(each for each in model.buffers() if each.is_floating_point())]
    return torch.cat([each.detach().float().reshape(-1) for each in tensors]).clone()


@contextmanager
def alone(
    name: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd, **options: Any
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, DistributedOptimizer]]:
    """One worker and its server."""
    with MemoryServer(serving(ServerCore())) as server:
        model = mlp(0)
        inner = optimizer(model)
        with tw.distribute(
            model, inner, server=server.connect(), rank=0, workers=1, design=name, timeout=10, **options
        ) as opt:
            yield model, inner, opt


def weights(model: nn.Module) -> torch.Tensor:
    """Without statistics, which a refused step's forward pass has changed."""
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def steps(
    count: int, step: Step = inner_step, first: int = 0
) -> Callable[[int, nn.Module, DistributedOptimizer], torch.Tensor]:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for each in range(first, count):
            step(model, opt, rank, each)
        opt.flush()
        return values(model)

    return train


def saving(count: int, step: Step = inner_step) -> Callable[[int, nn.Module, DistributedOptimizer], dict[str, Any]]:
    """Trains, and returns the states of model and optimizer, each of which waits for the last exchange."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, Any]:
        for each in range(count):
            step(model, opt, rank, each)
        saves: list[tuple[str, Any]] = [("model", model), ("opt", opt)]
        return copy.deepcopy({name: each.state_dict() for name, each in (saves if rank else reversed(saves))})

    return train


def resume(
    saved: list[dict[str, Any]],
    core: ServerCore,
    design: str,
    those: range,
    make: Callable[[int], nn.Module] = mlp,
    train: Callable[[int, nn.Module, DistributedOptimizer], torch.Tensor] | None = None,
    optimizer: Callable[[nn.Module], Optimizers] | None = None,
) -> list[torch.Tensor]:
    """Workers and a shard resume from their states."""
    server, address = start_server(again(core), "memory")

    def work(rank: int) -> torch.Tensor:
        model = make(rank)
        model.load_state_dict(saved[rank]["model"])
        place: dict[str, Any] = {"server": address(), "rank": rank, "workers": len(saved), "timeout": 30}
        inner = (optimizer or inner_optimizer(design))(model)
        with tw.distribute(model, inner, design=design, resume=saved[rank]["opt"], **place) as opt:
            return (train or steps(those.stop, first=those.start))(rank, model, opt)

    with server, ThreadPoolExecutor(len(saved)) as pool:
        return list(pool.map(work, range(len(saved))))


def assert_resumes(
    design: str,
    stop: int,
    total: int,
    make: Callable[[int], nn.Module] = wide,
    optimizer: Callable[[nn.Module], Optimizers] | None = None,
    step: Step = inner_step,
) -> tuple[list[dict[str, Any]], ServerCore]:
    """Checks that two workers and a shard that stop and resume end with the bits of a run that did not stop.

    Returns:
        What the workers saved, and the shard.
    """
    made = optimizer or inner_optimizer(design)
    whole, _ = run_cluster(make, steps(total, step), workers=2, optimizer=made, design=design)
    saved, core = run_cluster(make, saving(stop, step), workers=2, optimizer=made, design=design)
    found = resume(saved, core, design, range(stop, total), make, steps(total, step, stop), optimizer)
    assert all(map(torch.equal, found, whole)), f"{design} from step {stop}"
    return saved, core


def disagree(*designs: str) -> list[BaseException | None]:
    """Workers with a design each meet at one server; returns what each of them ended with."""
    server, address = start_server(ServerCore(), "memory")

    def work(rank: int) -> None:
        model = mlp(rank)
        place: dict[str, Any] = {"server": address(), "rank": rank, "workers": len(designs), "timeout": 120}
        with tw.distribute(model, adamw(model), design=designs[rank], **place) as opt:
            steps(3)(rank, model, opt)

    with ThreadPoolExecutor(len(designs)) as pool:
        with server:
            futures = [pool.submit(work, rank) for rank in range(len(designs))]
            wait(futures, return_when=FIRST_EXCEPTION)
        # Without the server the one that came first no longer waits for another worker.
        return [future.exception() for future in futures]
