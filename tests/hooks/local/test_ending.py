"""Local updates that end within a round: warnings keep a script from taking one rank's weights for the shared ones."""

from __future__ import annotations

import copy
import gc
import io
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.hooks.ddp_ranks import run_ranks
from tests.hooks.local_runs import adamw, inner_step, mlp, values
from thinwire.errors import TransportError

Told = tuple[list[str], torch.Tensor]


def told_of(run: Callable[[nn.Module, Any], None], rank: int, design: str = "local-sgd[h=4]", steps: int = 7) -> Told:
    """Returns the warnings, and the weights at the end."""
    model = mlp(rank)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        opt: Any = tw.distribute(model, adamw(model), group=dist.group.WORLD, design=design, min_numel=1)
        for step in range(steps):
            inner_step(model, opt, rank, step)
        run(model, opt)
        dist.barrier()
        opt = None
        gc.collect()
    return [str(each.message) for each in told], values(model)


def saves(model: nn.Module, opt: Any) -> None:
    torch.save(model.state_dict(), io.BytesIO())
    opt.close()


def saves_a_checkpoint(model: nn.Module, opt: Any) -> None:
    model.state_dict(), opt.state_dict()
    inner_step(model, opt, 0, 8)
    opt.state_dict(), model.state_dict()
    opt.close()


def saves_shared(model: nn.Module, opt: Any) -> None:
    with opt.shared_weights():
        model.state_dict()
    torch.save(copy.deepcopy(model), io.BytesIO())
    copy.deepcopy(model).state_dict()
    opt.flush()
    model.state_dict()
    opt.close()


CASES: dict[str, tuple[Any, ...]] = {
    "forgotten": (lambda model, opt: None,),
    "closed": (lambda model, opt: opt.close(),),
    "flushed": (lambda model, opt: opt.flush(),),
    "saves": (saves,),
    "saves where residuals wait": (saves, "local-sgd[h=4]", 8),
    "saves after a round": (saves, "local-sgd[h=4,codec=fp32]", 8),
    "saves an update": (saves, "update", 5),
    "saves a checkpoint": (saves_a_checkpoint,),
    "saves shared": (saves_shared,),
}


def ends(rank: int) -> dict[str, Told]:
    return {name: told_of(case[0], rank, *case[1:]) for name, case in CASES.items()}


def dies(rank: int) -> tuple[str, float]:
    """Rank 1's process ends; returns the other ranks' error, and the seconds that leaving takes from then on."""
    model, raised_at = mlp(rank), 0.0
    try:
        with tw.distribute(model, adamw(model), group=dist.group.WORLD, design="local-sgd[h=2]") as opt:
            for step in range(100):
                if (rank, step) == (1, 5):
                    os._exit(0)
                try:
                    inner_step(model, opt, rank, step)
                except TransportError:
                    raised_at = time.monotonic()
                    raise
    except TransportError as error:
        return str(error), time.monotonic() - raised_at
    return "", 0.0


@pytest.fixture(scope="module")
def found() -> list[dict[str, Told]]:
    return run_ranks(2, ends)


def test_end_within_round_warns_of_unshared_steps(found: list[dict[str, Told]]) -> None:
    for each in found:
        [told] = each["forgotten"][0]
        assert "3 steps that no other rank has" in told
    for name in CASES:
        first, second = (each[name][1] for each in found)
        assert torch.equal(first, second) == (name != "forgotten"), name


def test_saving_private_weights_warns_once(found: list[dict[str, Told]]) -> None:
    for each in found:
        for name in ("saves", "saves where residuals wait"):
            [told] = each[name][0]
            assert "model.state_dict() was called after step" in told, name
        for name in set(CASES) - {"forgotten", "saves", "saves where residuals wait"}:
            assert each[name][0] == [], name


def test_dead_rank_ends_other_ranks_at_once() -> None:
    first, dead, third = run_ranks(3, dies)
    assert dead is None
    for told, seconds in (first, third):
        assert "rank 1 is gone" in told and seconds < 1, (told, seconds)
