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
from thinwire.codecs import codec
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.steering import Steering
from thinwire.policies.assignment import Partition
from thinwire.policies.designs import design as find_design
from thinwire.worker.model import PlannedTensor, WorkerTensor


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


@pytest.mark.parametrize("outer", [False, True])
def test_rates_that_steer_are_those_of_the_round_whether_or_not_its_answer_is_waited_for(outer: bool) -> None:
    """An outer rate may be written while the answer is on its way, and counts from the next push."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(8):
            if not outer:
                opt.param_groups[0]["lr"] = 0.01 / (1 + step)
            inner_step(model, opt, rank, step)
            if outer and step % 2:  # what was changed has just been pushed
                opt.outer_groups[0]["lr"] = 1 / (1 + step)
        return first_moments(model, opt)

    design = "local-sgd[h=2,codec=fp32,steer=0.6]"
    later, at_once = (
        run_cluster(mlp, train, workers=2, optimizer=adamw, design=design, overlap=overlap)[0]
        for overlap in (True, False)
    )
    assert all(map(torch.equal, later, at_once))


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


@pytest.mark.parametrize("design", ["local-sgd[h=4,steer={}]", "sparseloco[h=8,steer={}]"])
def test_updates_that_waited_since_rates_were_high_lead_to_no_huge_momentum(design: str) -> None:
    """A rate that falls to a thousandth for two rounds, and rises again."""

    def longest(rank: int, model: nn.Module, opt: DistributedOptimizer) -> float:
        found = 0.0
        for step in range(64):
            opt.param_groups[0]["lr"] = 1e-5 if step % 32 >= 16 else 1e-2
            inner_step(model, opt, rank, step)
            for state in opt.state.values() if step >= 20 else ():
                first, second = state["exp_avg"], state["exp_avg_sq"]
                found = max(found, float((first / (second.sqrt() + 1e-8)).abs().max()))
        return found

    unsteered, steered = (
        max(run_cluster(mlp, longest, workers=2, optimizer=adamw, design=design.format(share))[0]) for share in (0, 0.6)
    )
    assert steered < 3 * unsteered


def test_optimizers_of_unknown_moments_go_unsteered() -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    found = [
        run_cluster(mlp, steps(9), workers=2, optimizer=sgd, design=f"local-sgd[h=4{steer}]")[0][0]
        for steer in ("", ",steer=0")
    ]
    assert torch.equal(*found)


def test_a_rate_of_zero_steers_nothing() -> None:
    def resting(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.0)

    [found, _], _ = run_cluster(mlp, steps(9), workers=2, optimizer=resting, design="local-sgd[h=4]")
    parameters = nn.utils.parameters_to_vector(mlp(0).parameters())
    assert torch.equal(found[: parameters.numel()], parameters.detach())


def test_the_share_that_steers_unless_told_otherwise() -> None:
    cases: list[tuple[str, float | None]] = [
        ("local-sgd[h=8]", 0.6),
        ("local-sgd[h=4,codec=int8]", 0.6),
        ("local-sgd[h=2,steer=0.1]", 0.1),
        ("local-sgd[h=4,codec=topk,steer=0.3]", 0.3),
        ("sparseloco[h=15,codec_down=blocktopk[k=148]]", None),
        ("local-sgd[h=2]", 0.0),
        ("local-sgd[h=4,fragments=2]", 0.0),
        ("local-sgd[h=4,delay=1]", 0.0),
        ("local-sgd[h=4,outer_momentum=0.3]", 0.0),
        ("local-sgd[h=4,reduce=sum]", 0.0),
        ("local-sgd[h=4,codec=topk]", 0.0),  # updates wait for many rounds
        ("local-sgd[h=4,codec_down=topk]", 0.0),
        ("local-sgd[h=4,codec=blocktopk[k=32],reduce=mean-of-senders]", 0.0),
        ("sparseloco[h=2]", 0.0),
        ("sparseloco[steer=0]", 0.0),
        ("sparseloco[reduce=mean]", 0.0),
        ("update", 0.0),
    ]
    for name, steer in cases:
        local = find_design(name).local
        assert local is not None and (local.steer > 0 if steer is None else local.steer == steer), name


def test_a_round_that_flush_ends_steers_no_more() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Any:
        for step in range(6):
            inner_step(model, opt, rank, step)
        before = opt.state_dict()["steering"]["rates"]
        opt.flush()
        return before, opt.state_dict()["steering"]["rates"]

    [(before, after)], _ = run_cluster(mlp, train, workers=1, optimizer=adamw, design="local-sgd[h=4]")
    assert before == [0.02] and after == [0.0]


def test_parameters_without_gradients_have_no_moments_to_steer() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Any:
        model[0].weight.requires_grad_(False)  # type: ignore[index]  # frozen before any step
        for step in range(9):
            inner_step(model, opt, rank, step)
        opt.flush()
        return model[0].weight in opt.state, values(model)  # type: ignore[index]

    found, _ = run_cluster(mlp, train, workers=2, optimizer=adamw, design="local-sgd[h=4]")
    assert [known for known, _ in found] == [False, False]
    assert torch.equal(found[0][1], found[1][1]) and torch.isfinite(found[0][1]).all()


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_steering_in_one_pass_equals_torchs_operations(dtype: torch.dtype, within: float) -> None:
    """Channels last has another order in memory, and is left to torch."""
    moments = []
    for memory in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(8, 6, 3, 3, dtype=dtype))
        adam = torch.optim.AdamW([parameter], lr=0.02)
        for _ in range(3):
            parameter.grad = torch.randn_like(parameter)
            adam.step()
        state = adam.state[parameter]
        state["exp_avg_sq"] = state["exp_avg_sq"].to(memory_format=memory)
        steering = Steering([adam], 0.6, [{"lr": 1.0}])
        steering.stepped()
        steering.pushed()
        before = parameter.detach() + 0.01 * torch.randn_like(parameter)
        partition = Partition(0, 0, parameter.numel())
        tensor = WorkerTensor(PlannedTensor("weight", parameter, False, codec("fp32"), ((partition, 0),)))
        leads, own = steering.leads([tensor]), state["exp_avg"].clone()
        steering.updated([tensor], [before.reshape(-1).clone()])
        assert not torch.equal(state["exp_avg"], own)
        moments.append(state["exp_avg"])
        if memory is torch.contiguous_format and dtype == torch.float32:
            assert leads is not None
            [lead] = leads
            assert lead is not None and lead.first is state["exp_avg"] and lead.second is state["exp_avg_sq"]
            after = parameter.detach()
            change = before - after - lead.decay * after
            moment = (lead.second.sqrt() * lead.correction + lead.eps) * change * lead.factor
            torch.testing.assert_close(state["exp_avg"], own.lerp(moment, 0.6))
        else:
            assert leads is None
    torch.testing.assert_close(*moments, rtol=within, atol=within)
