"""Local updates through the whole stack: against plain torch by hand, equal replicas, and rounds that flush() ends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, inner_step, mlp, steps, values
from thinwire.errors import ConfigError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.local_optimizer import LocalUpdateOptimizer

WORKERS = 3
STEER = 0.6
"""Of `local-sgd`, unless it says otherwise."""


def by_hand(
    count: int, h: int, outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer], warmup: int, steer: float = 0.0
) -> torch.Tensor:
    """DiLoCo in one process with plain torch; buffers are averaged, and first moments steered by the common change."""
    shared = mlp(0)
    models = [copy.deepcopy(shared) for _ in range(WORKERS)]
    inner = [adamw(model) for model in models]
    outer_optimizer = outer(list(shared.parameters()))
    taken = 0
    for step in range(count):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            inner_step(model, optimizer, rank, step)
        taken += 1
        if step >= warmup and (step + 1 - warmup) % h and step + 1 < count:
            continue
        with torch.no_grad():
            for name, parameter in shared.named_parameters():
                local = [model.get_parameter(name) for model in models]
                parameter.grad = torch.stack([parameter - each for each in local]).sum(0) / WORKERS
            before = {name: parameter.detach().clone() for name, parameter in shared.named_parameters()}
            outer_optimizer.step()
            for name, parameter in shared.named_parameters():
                for model, optimizer in zip(models, inner, strict=True):
                    lead(optimizer, model.get_parameter(name), before[name], parameter, taken, steer)
            taken = 0
            for name, buffer in shared.named_buffers():
                if buffer.is_floating_point():
                    buffer.copy_(torch.stack([model.get_buffer(name) for model in models]).sum(0) / WORKERS)
            for model in models:
                for mine, theirs in zip(values_of(model), values_of(shared), strict=True):
                    mine.copy_(theirs)
    return values(shared)


def lead(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    before: torch.Tensor,
    after: torch.Tensor,
    taken: int,
    steer: float,
) -> None:
    """Replaces a share of AdamW's first moment by one that steps along the common change, without the decay."""
    [group], state = optimizer.param_groups, optimizer.state[parameter]
    if steer:
        first, second = (1 - beta ** float(state["step"]) for beta in group["betas"])
        root = (state["exp_avg_sq"] / second).sqrt() + group["eps"]
        direction = (before - after) / (taken * group["lr"]) - group["weight_decay"] * after
        state["exp_avg"].lerp_(direction * root * first, steer)


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *(each for each in model.buffers() if each.is_floating_point())]


def plain(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def nesterov(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


SUM = f"codec=fp32,codec_down=fp32,small=fp32,steer=0,reduce=sum,outer_lr={1 / WORKERS}"


def test_uncompressed_training_equals_plain_torch() -> None:
    cases: list[tuple[str, int, int, Any, float]] = [
        ("update[codec=fp32]", 1, 0, plain, 0.0),
        ("local-sgd[h=4,steer=0,codec=fp32]", 4, 0, plain, 0.0),
        (f"local-sgd[h=4,{SUM}]", 4, 0, plain, 0.0),  # of changes: statistics are averaged all the same
        ("local-sgd[h=4,codec=fp32]", 4, 0, plain, STEER),
        ("local-sgd[h=4,steer=0.3,warmup=3,codec=fp32]", 4, 3, plain, 0.3),
        ("diloco[h=5,codec=fp32]", 5, 0, nesterov, 0.0),
    ]
    for design, h, warmup, outer, steer in cases:
        found, _ = run_cluster(mlp, steps(13), workers=WORKERS, optimizer=adamw, design=design)
        torch.testing.assert_close(found[0], by_hand(13, h, outer, warmup, steer), rtol=1e-4, atol=1e-5, msg=design)


def test_replicas_are_bit_identical_and_repeat_over_every_transport() -> None:
    for design in [
        "update",
        "local-sgd[h=4,codec=3lc[s=1.5]]",
        "streaming-diloco[h=6,fragments=3,delay=2]",
        "diloco[h=3,outer=SignSGD,outer_lr=0.001,outer_momentum=0,nesterov=false]",
    ]:
        memory, grpc = (
            run_cluster(mlp, steps(15), workers=WORKERS, optimizer=adamw, design=design, transport=transport)[0]
            for transport in ("memory", "grpc")
        )
        assert torch.isfinite(memory[0]).all() and all(torch.equal(each, memory[0]) for each in memory + grpc), design


def twice(rank: int, model: nn.Module, optimizer: Any) -> None:
    """Every third step is taken again with the gradients that are there, and no forward pass before it."""
    for step in range(9):
        inner_step(model, optimizer, rank, step)
        if step % 3 == 0:
            optimizer.step()


@pytest.mark.parametrize("design", ["update[codec=fp32]", "local-sgd[h=3,codec=fp32]"])
def test_delayed_answer_keeps_steps_before_it(design: str) -> None:
    def work(rank: int, model: nn.Module, optimizer: DistributedOptimizer) -> torch.Tensor:
        twice(rank, model, optimizer)
        optimizer.sync()
        return values(model)

    [found], _ = run_cluster(mlp, work, workers=1, optimizer=adamw, design=design)
    alone = mlp(0)
    twice(0, alone, adamw(alone))
    torch.testing.assert_close(found, values(alone), rtol=1e-4, atol=1e-5)


def test_shared_weights_are_equal_and_local_weights_return() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, ...]:
        assert isinstance(opt, LocalUpdateOptimizer)
        for step in range(5):
            inner_step(model, opt, rank, step)
        before = values(model)
        with opt.shared_weights():
            shared = values(model)
            with pytest.raises(ConfigError, match=r"inside `with opt.shared_weights\(\):`"):
                opt.state_dict()
        return before, shared, values(model)

    [(mine, shared, after), (theirs, shared_too, _)], _ = run_cluster(
        mlp, train, optimizer=adamw, design="local-sgd[h=3]"
    )
    assert torch.equal(shared, shared_too) and torch.equal(mine, after)
    assert not torch.equal(mine, theirs) and not torch.equal(mine, shared)


def test_keep_unsent_keeps_requested_share_in_local_parameters() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(6):
            inner_step(model, opt, rank, step)
        opt.sync()
        local = model.get_parameter("0.weight").detach().clone()
        with opt.shared_weights():
            shared = model.get_parameter("0.weight").detach().clone()
        unsent = opt.state_dict()["contexts"]["0.weight"]["residual"].view(shared.shape)
        assert float(unsent.abs().max()) > 0
        torch.testing.assert_close(local, shared - 0.5 * unsent)
        opt.flush()
        return values(model)

    for design in ("update[keep_unsent=0.5]", "local-sgd[h=3,keep_unsent=0.5]"):
        found, _ = run_cluster(mlp, train, workers=WORKERS, optimizer=adamw, design=design)
        assert all(torch.equal(each, found[0]) for each in found), "at the end all have the shared ones"


PLAIN = "outer_lr=1,outer_momentum=0,nesterov=false,codec_down=fp32"


@pytest.mark.parametrize("design", ["streaming-diloco[h=6,fragments=3,delay=1]", "local-sgd[h=4]"])
@pytest.mark.parametrize("at", [8, 9, 11])
def test_flush_in_mid_round_ends_round_on_all_workers(design: str, at: int) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, torch.Tensor]:
        early = steps(at)(rank, model, opt)
        return early, steps(20, first=at)(rank, model, opt)

    [one, other], _ = run_cluster(mlp, train, optimizer=adamw, design=design)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]) and not torch.equal(one[0], one[1])


@pytest.mark.parametrize(
    "base",
    [
        "update[codec_down=fp32,{}]",
        "local-sgd[h=3,codec_down=fp32,{}]",
        f"streaming-diloco[h=6,fragments=3,delay=2,{PLAIN},{{}}]",
    ],
)
def test_flush_settles_residuals(base: str) -> None:
    """Sent and waiting changes keep their sum, and each settling exchange leaves less waiting."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, torch.Tensor, int]:
        found = steps(5)(rank, model, opt)
        return found, opt.state_dict()["contexts"]["0.weight"]["residual"].flatten().clone(), opt.clock

    waits, all_in_all, exchanges = [], [], []
    for settle in (0, 1, 4):
        found, _ = run_cluster(mlp, train, workers=3, optimizer=adamw, design=base.format(f"settle={settle}"))
        assert all(torch.equal(each, found[0][0]) for each, _, _ in found)
        unsent = torch.stack([residual for _, residual, _ in found])
        waits.append(float(unsent.norm()))
        all_in_all.append(found[0][0][: unsent.shape[1]] - unsent.mean(0))
        exchanges.append(found[0][2])
    assert 0 < waits[2] < 0.5 * waits[1] < 0.5 * waits[0]
    torch.testing.assert_close(all_in_all[1:], [all_in_all[0]] * 2, rtol=1e-5, atol=1e-6)
    assert [each - exchanges[0] for each in exchanges] == [0, 1, 4]


@pytest.mark.parametrize("stop", [7, 8, 9, 10])
def test_flush_before_delayed_answer_pushes_once(stop: int) -> None:
    """The push after six steps reaches the shared parameters once, or waits in the residual."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, torch.Tensor]:
        weight = model.get_parameter("0.weight")
        began = weight.detach().clone()
        for step in range(stop):
            opt.zero_grad()
            (weight * -direction * 2.0**step).sum().backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.flush()
        return weight.detach() - began, opt.state_dict()["contexts"]["0.weight"]["residual"].view(weight.shape)

    def whole_steps(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    direction = torch.rand(mlp(0).get_parameter("0.weight").shape) + 0.1
    design = f"diloco[h=6,delay=4,codec=topk,fraction=0.1,settle=0,{PLAIN}]"
    [(moved, waits)], _ = run_cluster(mlp, train, workers=1, optimizer=whole_steps, design=design)
    assert float(waits.abs().max()) > 0
    torch.testing.assert_close(moved - waits, (2.0**6 - 1) * direction, rtol=1e-5, atol=1e-4)


def momenta(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
    """After some rounds on different data on each worker."""
    for step in range(12):
        inner_step(model, opt, rank, step)
    opt.sync()
    return torch.cat([opt.state[parameter]["exp_avg"].reshape(-1) for parameter in model.parameters()]).clone()


def apart(design: str) -> float:
    [first, second], _ = run_cluster(mlp, momenta, workers=2, optimizer=adamw, design=design)
    return float((first - second).norm() / (first + second).norm())


def test_steering_reduces_differences_of_momenta() -> None:
    unsteered, somewhat, much = (apart(f"local-sgd[h=4,steer={share}]") for share in (0, 0.3, 0.9))
    assert 0 < much < somewhat < unsteered


@pytest.mark.parametrize("amsgrad", [False, True])
def test_steering_single_worker_has_no_effect(amsgrad: bool) -> None:
    """One worker, uncoded, H = 1: the shared update is its own."""

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=amsgrad)

    runs = [
        run_cluster(mlp, steps(8), workers=1, optimizer=adam, design=f"local-sgd[h=1,codec=fp32,steer={share}]")[0][0]
        for share in (0.0, 0.5)
    ]
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-3, atol=1e-4)
