"""300 random damages of every kind of state: each is refused with a ConfigError and changes nothing, or is valid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.damaged_states import check_loads
from tests.hooks.cluster import run_cluster
from tests.hooks.ddp_ranks import run_cases
from tests.server.conversation import Shard, make_plan
from thinwire.hooks import ddp, fsdp
from thinwire.server.core import ServerCore

SEEDS = range(300)
DESIGNS = ["3lc", "update", "diloco[h=2]"]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 12)).square().mean().backward()
    optimizer.step()


def test_compression_context_refuses_damaged_state() -> None:
    context = tw.codec("3lc", lag=3).context(torch.zeros(40, 12))
    context.encode(torch.randn(40, 12))
    assert not check_loads(context.state_dict(), context.state_dict, context.load_state_dict, SEEDS)


@pytest.mark.parametrize("downlink", ["delta", "gradient", "momentum"])
def test_server_refuses_damaged_state(downlink: str) -> None:
    shard = Shard(make_plan(state=True, downlink=downlink))
    for each in range(3):
        shard.step(each)
    cores = [ServerCore()]

    def load(state: dict[str, Any]) -> None:  # a shard loads before it begins
        fresh = ServerCore()
        fresh.load_state_dict(state)
        cores[0] = fresh

    assert not check_loads(shard.core.state_dict(), lambda: cores[0].state_dict(), load, SEEDS)


@pytest.mark.filterwarnings("ignore:an outer rate")  # with SGD
@pytest.mark.parametrize("design", ["3lc", "update", "diloco[h=2]"])
def test_worker_refuses_damaged_state(design: str) -> None:
    def train(_rank: int, model: nn.Module, opt: Any) -> list[str]:
        for _ in range(3):
            step(model, opt)
        opt.sync()
        return check_loads(opt.state_dict(), opt.state_dict, opt.load_state_dict, SEEDS)

    [wrong], _ = run_cluster(lambda _: mlp(), train, workers=1, design=design)
    assert not wrong


def group_case(rank: int, design: str) -> list[str]:
    model = mlp()
    opt = tw.distribute(model, torch.optim.AdamW(model.parameters()), group=dist.group.WORLD, design=design)
    with opt:
        for _ in range(3):
            step(model, opt)
        opt.flush()
        dist.barrier()
        wrong = check_loads(opt.state_dict(), opt.state_dict, opt.load_state_dict, SEEDS) if rank == 0 else []
        dist.barrier()
    return wrong


def hook_case(rank: int, kind: str, codec: str) -> list[str]:
    model = mlp()
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
        state: Any = fsdp.compress(model, codec, measure_link=False)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
        state = ddp.compress(model, codec, measure_link=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    dist.barrier()
    wrong = check_loads(state.state_dict(), state.state_dict, state.load_state_dict, SEEDS) if rank == 0 else []
    dist.barrier()
    return wrong


def test_ranks_refuse_damaged_states() -> None:
    cases: dict[str, tuple[Any, ...]] = {f"{design} in a group": (group_case, design) for design in DESIGNS}
    cases |= {f"{kind}, {codec}": (hook_case, kind, codec) for kind in ("ddp", "fsdp") for codec in ("3lc", "auto")}
    found = run_cases(2, cases, timeout_s=300)
    wrong = {name: results[0] for name, results in found.items() if results[0]}
    assert not wrong, wrong
