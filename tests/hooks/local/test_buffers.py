"""Buffers: one rule for all ways to train; after a flush all ranks have the same, whatever their dtype and shape."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.ddp_ranks import run_cases
from tests.hooks.local_runs import inner_step, mlp, sgd

DESIGNS = ("fp32", "3lc", "update", "local-sgd[h=2]")


class Seen(nn.Module):
    """Has statistics that begin with Inf, with no values, and as an integer; and a mask that never changes."""

    largest: torch.Tensor
    seen: torch.Tensor
    count: torch.Tensor

    def __init__(self, *, grows: bool) -> None:
        super().__init__()
        self.grows = grows
        self.register_buffer("largest", torch.full((3,), -torch.inf))
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.largest = torch.maximum(self.largest, x.detach().amax() * torch.ones(3))
                self.count += int(x[0, 0] > 0)
                if self.grows:
                    self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
        return x


def model_of(rank: int, *, grows: bool) -> nn.Module:
    return nn.Sequential(Seen(grows=grows), *mlp(rank))  # type: ignore[misc]


def trains(rank: int, design: str) -> dict[str, torch.Tensor]:
    model = model_of(rank, grows=design not in ("fp32", "3lc"))  # DistributedDataParallel cannot send what grows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = tw.distribute(model, sgd(model), group=dist.group.WORLD, design=design)
        for step in range(5):
            inner_step(model, opt, rank, step)
        opt.flush()
        found = copy.deepcopy(dict(model.named_buffers()))
        opt.close()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return run_cases(2, {design: (trains, design) for design in DESIGNS})


@pytest.mark.parametrize("design", DESIGNS)
def test_flush_makes_buffers_equal_on_ranks(found: dict[str, list[Any]], design: str) -> None:
    first, second = found[design]
    assert len(first) == 7 and first.keys() == second.keys()
    for name, buffer in first.items():
        assert torch.equal(buffer, second[name]), name
    assert len(first["0.seen"]) == (0 if design in ("fp32", "3lc") else 5) and first["0.largest"].isfinite().all()


@pytest.mark.filterwarnings("ignore:buffers that begin empty")
@pytest.mark.parametrize("design", ["3lc", "local-sgd[h=2]"])
def test_unexchanged_buffers_with_servers_warn_once(design: str) -> None:
    def train(rank: int, model: nn.Module, opt: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(4):
                inner_step(model, opt, rank, step)
                opt.flush()
        return [str(each.message) for each in told]

    told, _ = run_cluster(lambda rank: model_of(rank, grows=False), train, workers=1, optimizer=sgd, design=design)
    assert len(told[0]) == 1 and told[0][0].startswith("buffers 0.largest began with Inf")
