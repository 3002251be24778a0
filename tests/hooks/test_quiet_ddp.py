"""Local updates of a model that a framework has wrapped in DistributedDataParallel: the wrapper stays and is quiet."""

from __future__ import annotations

import copy
import io
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


def train(model: Any, rank: int, design: str, *, accumulates: bool = False) -> torch.Tensor:
    """The parameters at the end; a first backward pass of every step may be under `no_sync`."""
    wrapped = isinstance(model, DistributedDataParallel)
    module = model.module if wrapped else model
    with tw.distribute(model, adamw(module), group=dist.group.WORLD, design=design) as optimizer:
        for step in range(STEPS):
            if accumulates:
                with model.no_sync() if wrapped else nullcontext():
                    loss = torch.nn.functional.mse_loss(model(torch.ones(4, 12)), torch.zeros(4, 3))
                    loss.backward()  # type: ignore[no-untyped-call]
            inner_step(model, optimizer, rank, step)
        optimizer.flush()
        return torch.cat([values(module), module.get_buffer("1.running_mean")])


def heard_after(model: Any) -> str:
    """What a backward pass of it says."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        model(torch.ones(4, 12)).sum().backward()
    return " ".join(str(each.message) for each in heard)


def refused(model: Any, group: Any = None) -> str:
    try:
        tw.distribute(model, adamw(model), group=group or dist.group.WORLD, design="update")
    except ThinwireError as error:
        return str(error)
    return "nothing was refused"


def run(rank: int, design: str) -> dict[str, Any]:
    warnings.simplefilter("error")
    model = DistributedDataParallel(mlp(rank))
    found: dict[str, Any] = {
        "plain": train(mlp(rank), rank, design),
        "wrapped": train(model, rank, design),
        "accumulated": train(DistributedDataParallel(mlp(rank)), rank, design, accumulates=True),
        "over": heard_after(model),
    }
    pickled = io.BytesIO()
    torch.save(model, pickled)
    for way, again in (("again", model), ("copied", copy.deepcopy(model))):
        again.module.load_state_dict(mlp(rank).state_dict())
        found[way] = train(again, rank, design)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    found["other ranks"] = refused(DistributedDataParallel(mlp(rank)), alone)
    unused = DistributedDataParallel(mlp(rank), find_unused_parameters=True)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        tw.distribute(unused, adamw(unused), group=dist.group.WORLD, design=design).close()
    found["unused"] = " ".join(str(each.message) for each in heard)
    return found


@pytest.mark.parametrize("design", ["local-sgd[h=4,codec=3lc]", "update"])
def test_the_wrapper_changes_no_bit_and_says_when_its_training_is_over(design: str) -> None:
    ranks = run_ranks(2, run, design)
    for found in ranks:
        assert all(torch.equal(found["plain"], found[way]) for way in ("wrapped", "again", "copied"))
        assert not torch.equal(found["plain"], found["accumulated"])
        assert "every rank trains by itself" in found["over"]
        assert found["other ranks"] == "nothing was refused", "a rank alone exchanges nothing"
        assert "ddp_find_unused_parameters=False" in found["unused"]
    for way in ("plain", "wrapped", "accumulated"):
        one, other = (found[way] for found in ranks)
        assert torch.equal(one[:-40], other[:-40]), (
            "buffers are worker 0's after a while, and each one's own until then"
        )


def run_halves(rank: int) -> str:
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return refused(DistributedDataParallel(mlp(rank)), halves[rank // 2])


def test_a_wrapper_of_other_ranks_is_not_silenced() -> None:
    """Half of the ranks would train apart from the others."""
    for rank, said in enumerate(run_ranks(4, run_halves)):
        assert f"it is over ranks [0, 1, 2, 3], and group= over {[[0, 1], [2, 3]][rank // 2]}" in said, said


def run_resumed(rank: int) -> list[torch.Tensor]:
    """Ends of a training at once, and of one that stopped in the middle of a round, each under a wrapper."""
    ends, saved = [], dict[str, Any]()
    for begin, end in ((0, 9), (0, 6), (6, 9)):
        model: Any = DistributedDataParallel(mlp(rank))
        if begin:
            model.load_state_dict(saved["model"])
        group, inner = dist.group.WORLD, adamw(model)
        with tw.distribute(model, inner, group=group, design="local-sgd[h=4]", resume=saved.get("optimizer")) as opt:
            for step in range(begin, end):
                inner_step(model, opt, rank, step)
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": opt.state_dict()})
            opt.flush()
            ends.append(values(model.module))
        saved = saved if end == 6 else {}
    return [ends[0], ends[2]]


def test_a_wrapped_training_goes_on_from_what_every_rank_saved() -> None:
    for whole, resumed in run_ranks(2, run_resumed):
        assert torch.equal(whole, resumed)
