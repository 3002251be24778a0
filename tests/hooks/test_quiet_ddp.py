"""Local updates of a model that a framework has wrapped in DistributedDataParallel: the wrapper stays and is quiet."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import run_ranks
from tests.hooks.local_runs import adamw, inner_step, mlp, values
from thinwire.errors import ThinwireError

STEPS = 10


def trained(rank: int, design: str, *, wrapped: bool, accumulates: bool) -> torch.Tensor:
    """The parameters, with or without a wrapper; every other backward pass may be under `no_sync`."""
    module = mlp(rank)
    model: Any = DistributedDataParallel(module) if wrapped else module
    with tw.distribute(model, adamw(module), group=dist.group.WORLD, design=design) as optimizer:
        for step in range(STEPS):
            if accumulates:
                with model.no_sync() if wrapped else nullcontext():
                    torch.nn.functional.mse_loss(model(torch.ones(4, 12)), torch.zeros(4, 3)).backward()  # type: ignore[no-untyped-call]
            inner_step(model, optimizer, rank, step)
        optimizer.flush()
        return torch.cat([values(module), module.get_buffer("1.running_mean")])


def run(rank: int, design: str) -> tuple[list[torch.Tensor], list[str], str]:
    warnings.simplefilter("error")
    ends = [trained(rank, design, wrapped=wrapped, accumulates=False) for wrapped in (False, True)]
    ends.append(trained(rank, design, wrapped=True, accumulates=True))
    model = DistributedDataParallel(mlp(rank))
    tw.distribute(model, adamw(model), group=dist.group.WORLD, design=design).close()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        model(torch.ones(4, 12)).sum().backward()
    try:
        tw.distribute(model, adamw(model), group=dist.group.WORLD, design=design)
    except ThinwireError as error:
        return ends, [str(each.message) for each in heard], str(error)
    raise AssertionError("a wrapper that has been quiet is no new one")


@pytest.mark.parametrize("design", ["local-sgd[h=4,codec=3lc]", "update"])
def test_the_wrapper_changes_no_bit_and_says_when_its_training_is_over(design: str) -> None:
    ranks = run_ranks(2, run, design)
    for (plain, wrapped, accumulated), heard, refused in ranks:
        assert torch.equal(plain, wrapped) and not torch.equal(plain, accumulated)
        assert any("every rank trains by itself" in each for each in heard), heard
        assert "has a communication hook already" in refused
    for one, other in zip(ranks[0][0], ranks[1][0], strict=True):
        assert torch.equal(one[:-40], other[:-40]), (
            "buffers are worker 0's after a while, and each one's own until then"
        )
