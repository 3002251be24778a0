"""Models and steps for tests of the server mode: a small model, another one on every rank, on batches of a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import thinwire as tw
from tests.designs.network import Actor, Network
from tests.hooks.local_runs import batch as batch
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.runtime.metrics import MetricsWriter

torch.set_num_threads(1)

Weights = dict[str, torch.Tensor]
Train = Callable[[int, nn.Module, DistributedOptimizer], Any]


def mlp(rank: int) -> nn.Module:
    """The initial weights of rank 0 must win."""
    generator = torch.Generator().manual_seed(rank)
    model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def normed(rank: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(12), mlp(rank))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def backward(model: nn.Module, rank: int, step: int, share: float = 1.0) -> None:
    (share * loss_of(model, rank, step)).backward()  # type: ignore[no-untyped-call]


def one_step(model: nn.Module, opt: DistributedOptimizer, rank: int, step: int) -> None:
    opt.zero_grad()
    backward(model, rank, step)
    opt.step()


def steps(count: int) -> Callable[[int, nn.Module, DistributedOptimizer], Weights]:
    """Trains until so many steps are done, those of before a resume among them."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Weights:
        while opt.steps_done < count:
            one_step(model, opt, rank, opt.steps_done)
        opt.sync()
        return parameters_of(model)

    return train


def parameters_of(model: nn.Module) -> Weights:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def weights_of(model: nn.Module) -> Weights:
    """Parameters and buffers, by the names without `torch.compile`."""
    plain: Any = getattr(model, "_orig_mod", model)
    return {name: each.detach().clone() for name, each in plain.state_dict().items()}


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run(
    train: Train,
    *,
    workers: int = 2,
    model: Callable[[int], nn.Module] = mlp,
    metrics: Sequence[MetricsWriter] = (),
    **options: Any,
) -> tuple[list[Any], Network]:
    """Trains on a network with deliveries in the order of a seed; `metrics` has one for each worker."""

    def work(actor: Actor) -> Any:
        net = model(actor.rank)
        opt = tw.distribute(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
            server=actor.network.connect(actor),
            rank=actor.rank,
            workers=workers,
            metrics=metrics[actor.rank : actor.rank + 1],
            **options,
        )
        with opt:
            return train(actor.rank, net, opt)

    network = Network(work, workers=workers, chance=random.Random(1))
    return network.run(), network
