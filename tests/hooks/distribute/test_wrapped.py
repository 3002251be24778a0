"""Local updates of a model that a framework has wrapped in DistributedDataParallel: the wrapper stays and is quiet."""

from __future__ import annotations

import copy
import io
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import refusal, run_cases
from tests.hooks.local_runs import adamw, inner_step, mlp, values

STEPS = 10
DESIGNS = ("local-sgd[h=4,codec=3lc]", "update")


def train(model: Any, rank: int, design: str, *, accumulates: bool = False) -> torch.Tensor:
    """The parameters at the end; a first backward pass of every step may be under `no_sync`."""
    wrapped = isinstance(model, DistributedDataParallel)
    module = model.module if wrapped else model
    with tw.distribute(model, adamw(module), group=dist.group.WORLD, design=design) as optimizer:
        for step in range(STEPS):
            if accumulates:
                with model.no_sync() if wrapped else nullcontext():
                    model(torch.ones(4, 12)).square().mean().backward()
            inner_step(model, optimizer, rank, step)
        optimizer.flush()
        return torch.cat([values(module), module.get_buffer("1.running_mean")])


def heard(call: Any) -> str:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return " ".join(str(each.message) for each in caught)


def refused(model: Any, group: Any) -> str:
    return refusal(partial(tw.distribute, model, adamw(model), group=group, design="update"))


def run(rank: int, design: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = DistributedDataParallel(mlp(rank))
        found: dict[str, Any] = {
            "plain": train(mlp(rank), rank, design),
            "wrapped": train(model, rank, design),
            "accumulated": train(DistributedDataParallel(mlp(rank)), rank, design, accumulates=True),
            "over": heard(lambda: model(torch.ones(4, 12)).sum().backward()),
        }
        torch.save(model, io.BytesIO())
        for way, again in (("again", model), ("copied", copy.deepcopy(model))):
            again.module.load_state_dict(mlp(rank).state_dict())
            found[way] = train(again, rank, design)
        alone = [dist.new_group([each]) for each in range(2)][rank]
        found["alone"] = refused(DistributedDataParallel(mlp(rank)), alone)
        unused = DistributedDataParallel(mlp(rank), find_unused_parameters=True)
        begin = partial(tw.distribute, unused, adamw(unused), group=dist.group.WORLD, design=design)
        found["unused"] = heard(lambda: begin().close())
    return found


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    return run_cases(2, {design: (run, design) for design in DESIGNS})


def test_wrapper_changes_no_bit_and_warns_once_its_training_is_over(ranks: dict[str, list[Any]]) -> None:
    for design in DESIGNS:
        for found in ranks[design]:
            assert all(torch.equal(found["plain"], found[way]) for way in ("wrapped", "again", "copied"))
            assert not torch.equal(found["plain"], found["accumulated"])
            assert "every rank trains by itself" in found["over"]
            assert found["alone"] == "nothing", "a rank alone exchanges nothing"
            assert "ddp_find_unused_parameters=False" in found["unused"]
        for way in ("plain", "wrapped", "accumulated"):
            one, other = (found[way][:-40] for found in ranks[design])
            assert torch.equal(one, other), "but buffers, which are worker 0's after a while alone"
