"""A worker's momentum, led by what all workers did (`steer`): against arithmetic, and for workers of unlike data."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, inner_step, mlp, steps, values
from thinwire.hooks.distribute import DistributedOptimizer


def momenta(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
    """After some rounds on data of each worker's own."""
    for step in range(12):
        inner_step(model, opt, rank, step)
    return first_moments(model, opt)


def first_moments(model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
    opt.sync()
    return torch.cat([opt.state[parameter]["exp_avg"].reshape(-1) for parameter in model.parameters()]).clone()


def apart(design: str) -> float:
    [first, second], _ = run_cluster(mlp, momenta, workers=2, optimizer=adamw, design=design)
    return float((first - second).norm() / (first + second).norm())


def test_steering_brings_workers_momenta_nearer_to_each_other() -> None:
    unsteered, somewhat, much = (apart(f"local-sgd[h=4,steer={share}]") for share in (0, 0.3, 0.9))
    assert 0 < much < somewhat < unsteered


@pytest.mark.parametrize("amsgrad", [False, True])
def test_steering_one_worker_by_its_own_steps_changes_nothing(amsgrad: bool) -> None:
    """One worker, uncoded, H = 1: the shared update is its own."""

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=amsgrad)

    runs = [
        run_cluster(mlp, steps(8), workers=1, optimizer=adam, design=f"local-sgd[h=1,codec=fp32,steer={share}]")[0][0]
        for share in (0.0, 0.5)
    ]
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-3, atol=1e-4)


def shrunk(design: str, optimizer: Any, every: int = 1) -> float:
    """By which factor weights of 1 have shrunk after 120 steps, with noise for a gradient in every so-manieth."""

    def ones(_rank: int) -> nn.Module:
        model = nn.Linear(64, 64, bias=False)
        nn.init.ones_(model.weight)
        return model

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> float:
        noise = torch.Generator().manual_seed(1)
        for step in range(120):
            opt.zero_grad()
            model(torch.zeros(1, 64)).sum().backward()
            [weight] = model.parameters()
            weight.grad = torch.randn(64, 64, generator=noise) if step % every == 0 else None
            opt.step()
        opt.flush()
        return float(values(model).mean())

    [found], _ = run_cluster(ones, train, workers=1, optimizer=optimizer, design=design)
    return -math.log(found)


@pytest.mark.parametrize(
    ("design", "kind", "every"),
    [
        ("local-sgd[h=4,codec=fp32", torch.optim.AdamW, 1),
        ("local-sgd[h=4,codec=3lc", partial(torch.optim.Adam, decoupled_weight_decay=True), 1),
        ("local-sgd[h=4,codec=fp32", torch.optim.AdamW, 4),  # leaves a parameter without a gradient alone
        ("sparseloco[h=4", torch.optim.AdamW, 1),  # a value that was not sent has not changed at the shards
    ],
)
def test_steered_weights_decay_as_fast_as_unsteered_ones(design: str, kind: Any, every: int) -> None:
    """What decay has taken leads no momentum, which would take it again and again."""

    def decaying(model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1)
        return made

    unsteered, steered = (shrunk(f"{design},steer={share}]", decaying, every) for share in (0.0, 0.6))
    assert 0.7 < steered / unsteered < 1.2
    if every == 1 and design.startswith("local"):
        assert 0.9 < unsteered / 0.12 < 1.1 and steered / unsteered > 0.85
