"""`ddp.compress` where torch is used in ways that its hooks hear nothing of: as plain DDP does, or refused."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from tests.hooks.ddp_ranks import batch, ddp, mlp, run_ranks, train, weights
from thinwire.errors import ConfigError


class _Branches(nn.Module):
    """Of two layers each step takes one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(16, 40), nn.Linear(16, 40)])

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        found: torch.Tensor = self.branches[branch](x)
        return found


def _unused(rank: int) -> list[float]:
    """What waits for the second branch: after two compressed steps of it, uncompressed ones of the first, and one."""
    model = DistributedDataParallel(_Branches(), find_unused_parameters=True)
    state = ddp.compress(model, "auto", measure_link=False)
    assert state.auto is not None
    state.auto.pilot._decide = lambda: None  # type: ignore[method-assign]
    waits = []
    for step, (level, branch) in enumerate([(4, 1), (4, 1), (0, 0), (0, 0), (0, 1)]):
        state.auto.pilot.memory.level = level
        model.zero_grad()
        model(batch(rank, step)[0], branch).pow(2).mean().backward()
        residuals = state.core.residuals.state_dict()["residuals"]
        waits.append(float(residuals["branches.1.weight"].abs().max()))
    return waits


def _in_half_precision_by_default(rank: int) -> bool:
    """Whether `auto` changes no bit as long as it is uncompressed, as it stays where processors are not too busy."""
    plain, ours = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
    auto = ddp.compress(ours, "auto", measure_link=False).auto
    assert auto is not None
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (plain, ours)]
        for step in range(3):
            x, y = batch(rank, step, torch.float32)
            for model, optimizer in zip((plain, ours), optimizers, strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if auto.setting.codec is not None:
                break
            found, wanted = weights(ours.module), weights(plain.module)
            if not all(torch.equal(found[name], wanted[name]) for name in wanted):
                return False
    finally:
        torch.set_default_dtype(torch.float32)
    return True


def _joined(rank: int) -> str:
    model = DistributedDataParallel(mlp())
    ddp.compress(model, "fp32", measure_link=False)
    try:
        with model.join(divide_by_initial_world_size=False):
            train(model, rank, 2)
    except ConfigError as error:
        return str(error)
    return "taken"


def _python_reducer(rank: int) -> str:
    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        ddp.compress(DistributedDataParallel(mlp()), "fp32", measure_link=False)
    except ConfigError as error:
        return str(error)
    finally:
        torch._dynamo.config.optimize_ddp = before
    return "taken"


def _group_of_some(rank: int) -> dict[str, torch.Tensor] | None:
    """Rank 0 is in one more process group than the others, which torch's names of new groups depend on."""
    alone = dist.new_group([0])
    some = dist.new_group([0, 1])
    found = None
    if rank < 2:
        model = DistributedDataParallel(mlp(), process_group=some)
        ddp.compress(model, "3lc", measure_link=False, timeout=timedelta(seconds=15))
        train(model, rank, 2)
        found = weights(model)
    dist.barrier()
    del alone
    return found


def _forgotten(rank: int) -> tuple[bool, list[str]]:
    """Whether the residuals of a model that nobody closed are still there, and which threads are."""
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "3lc", measure_link=False)
    train(model, rank, 2)
    residuals = weakref.ref(state.core.residuals)
    del model, state
    gc.collect()
    return residuals() is None, [each.name for each in threading.enumerate() if each.name.startswith("thinwire-pu")]


def _connections(rank: int) -> tuple[int, int]:
    """How many sockets are open after each of two models that were trained and forgotten."""
    found = []
    for _ in range(2):
        model = DistributedDataParallel(mlp())
        state = ddp.compress(model, "3lc", measure_link=False)
        train(model, rank, 1)
        state.close()
        del model, state
        gc.collect()
        dist.barrier()
        found.append(len(psutil.Process().net_connections()))
    return found[0], found[1]


def _mixed_precision(rank: int) -> str:
    low = _MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.raises(ConfigError) as refused:
        ddp.compress(DistributedDataParallel(mlp(), mixed_precision=low), "fp32")
    return str(refused.value)


def run_all(rank: int) -> dict[str, Any]:
    return {
        "forgotten": _forgotten(rank),
        "unused": _unused(rank),
        "bfloat16": _in_half_precision_by_default(rank),
        "joined": _joined(rank),
        "mixed precision": _mixed_precision(rank),
        "python reducer": _python_reducer(rank),
        "some": _group_of_some(rank),
        "connections": _connections(rank),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """The results of every case, by rank."""
    return run_ranks(3, run_all)


def test_what_waits_for_a_branch_waits_until_some_step_takes_it(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        _, compressed, *elsewhere, taken = found["unused"]
        assert elsewhere == [compressed] * 2 and compressed > 0 and taken == 0


def test_auto_runs_in_half_precision_by_default(ranks: list[dict[str, Any]]) -> None:
    assert all(found["bfloat16"] for found in ranks)


def test_what_ddp_tells_no_hook_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("divides gradients by the ranks that still have data" in found["joined"] for found in ranks)
    assert all("python_reducer" in found["python reducer"] for found in ranks)
    assert all("leave it out, and compute in low precision by torch.autocast" in f["mixed precision"] for f in ranks)


def test_a_model_that_is_garbage_leaves_neither_residuals_nor_threads(ranks: list[dict[str, Any]]) -> None:
    assert all(found["forgotten"] == (True, []) for found in ranks)


def test_ranks_that_know_different_numbers_of_groups_meet_all_the_same(ranks: list[dict[str, Any]]) -> None:
    first, second, third = (found["some"] for found in ranks)
    assert third is None and all(torch.equal(first[name], second[name]) for name in first)


def test_connections_end_with_the_state(ranks: list[dict[str, Any]]) -> None:
    assert all(first == last for first, last in (found["connections"] for found in ranks))
