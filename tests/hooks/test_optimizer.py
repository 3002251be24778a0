"""One worker's optimizer: its state, what it holds back, what it notices."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import thinwire as tw
from tests.designs.network import Actor, Network
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.policies.designs import Design
from thinwire.runtime.metrics import MetricsWriter

torch.set_num_threads(1)

WORKERS = 2
Weights = dict[str, torch.Tensor]
FP32 = tw.codec("fp32")


def make(rank: int) -> nn.Module:
    generator = torch.Generator().manual_seed(rank)
    model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def one_step(model: nn.Module, opt: DistributedOptimizer, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 12, generator=generator)
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), (x[:, :3] + x[:, 3:6]).argmax(1)).backward()  # type: ignore[no-untyped-call]
    opt.step()


def steps(count: int) -> Callable[[int, nn.Module, DistributedOptimizer], Weights]:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Weights:
        for step in range(count):
            one_step(model, opt, rank, step)
        opt.sync()
        return weights_of(model)

    return train


def weights_of(model: nn.Module) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run(
    train: Callable[[int, nn.Module, DistributedOptimizer], Any],
    *,
    model: Callable[[int], nn.Module] = make,
    start: list[Weights] | None = None,
    workers: int = WORKERS,
    metrics: Sequence[MetricsWriter] = (),
    **options: Any,
) -> tuple[list[Any], Network]:
    """Trains; `metrics` has one for each worker."""

    def work(actor: Actor) -> Any:
        net = model(actor.rank)
        if start is not None:
            net.load_state_dict(start[actor.rank])
        opt = tw.distribute(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
            server=actor.network.connect(actor),
            rank=actor.rank,
            workers=workers,
            metrics=metrics[actor.rank : actor.rank + 1],
            **options,
        )
        with opt:
            return train(actor.rank, net, opt)

    network = Network(work, workers=workers, chance=random.Random(1))
    return network.run(), network


def test_a_resumed_run_is_bit_for_bit_the_run_that_was_not_interrupted() -> None:
    """Where the workers run the optimizer and pulls carry no residual, all state is the workers'."""

    def whole(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Weights:
        for step in range(8):
            one_step(model, opt, rank, step)
        opt.flush()
        return weights_of(model)

    def first(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[Weights, dict[str, Any]]:
        for step in range(3):
            one_step(model, opt, rank, step)
        opt.sync()
        return weights_of(model), opt.state_dict()

    def second(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Weights:
        opt.load_state_dict(saved[rank][1])
        assert opt.steps_done == 3
        while opt.steps_done < 8:
            one_step(model, opt, rank, opt.steps_done)
        opt.flush()
        return weights_of(model)

    for design, policy in (
        ("mem-sgd-1bit", "bsp"),
        ("mem-sgd-topk", "local[2]"),
        ("topk-sgd", "ssp[2]"),
        ("mem-sgd-topk", "adaptive[period,threshold=2]"),
    ):
        expected, _ = run(whole, design=design, consistency=policy)
        saved, _ = run(first, design=design, consistency=policy)
        resumed, _ = run(second, start=[weights for weights, _ in saved], design=design, consistency=policy)
        for found, wanted in zip(resumed, expected, strict=True):
            assert equal(found, wanted), (design, policy)


def test_the_state_holds_what_is_held_back_and_the_own_optimizers_momentum() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, Any]:
        for step in range(3):
            one_step(model, opt, rank, step)
        opt.sync()
        return opt.state_dict()

    [state, _], _ = run(train, design="mem-sgd-topk", consistency="local[2]")
    assert state["step"] == 3
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert state["contexts"][name]["accumulated"].abs().max() > 0
        assert state["contexts"][name]["accumulated_iterations"] == 1
    assert state["contexts"]["0.weight"]["residual"].abs().max() > 0
    assert any(buffers["momentum_buffer"] is not None for buffers in state["optimizer"]["state"].values())
    [state, _], _ = run(train, design="3lc")
    assert "optimizer" not in state and "accumulated" not in state["contexts"]["0.weight"]


def test_rates_and_other_options_of_the_groups_come_back() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[float, float]:
        scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
        for step in range(2):
            one_step(model, opt, rank, step)
            scheduler.step()
        state = opt.state_dict()
        opt.param_groups[0]["lr"] = 9.0
        opt.load_state_dict(state)
        opt.sync()
        return opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]

    results, _ = run(train, codec="3lc")
    assert results == [(0.025, 0.9)] * WORKERS


def test_a_state_of_another_model_is_refused_before_anything_changes() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        one_step(model, opt, rank, 0)
        opt.sync()
        state = opt.state_dict()
        short = {**state, "contexts": {"0.weight": state["contexts"]["0.weight"]}, "step": 99}
        with pytest.raises(tw.ConfigError, match=r"no residual for '0\.bias'; it has \['0\.weight'\]"):
            opt.load_state_dict(short)
        assert opt.steps_done == 1

    run(train, codec="3lc")


def test_flush_sends_what_accumulated_and_only_that() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[Weights, list[bool]]:
        accumulated = []
        for step in range(4):
            one_step(model, opt, rank, step)
        opt.sync()
        accumulated.append(any("accumulated" in context for context in opt.state_dict()["contexts"].values()))
        before = weights_of(model)
        opt.flush()
        accumulated.append(any("accumulated" in context for context in opt.state_dict()["contexts"].values()))
        assert not equal(before, weights_of(model))
        return weights_of(model), accumulated

    for policy in ("local[3]", "ssp[2]", "adaptive[period,threshold=3]"):
        results, _ = run(train, codec="fp32", consistency=policy)
        assert equal(results[0][0], results[1][0]), policy
        assert [accumulated for _, accumulated in results] == [[True, False]] * WORKERS, policy


def test_flush_of_a_policy_that_accumulates_nothing_is_a_sync() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        for step in range(3):
            one_step(model, opt, rank, step)
        opt.sync()
        clock = opt.clock
        opt.flush()
        assert opt.clock == clock

    for policy in ("bsp", "asp", "backup[1]", "ssp[2,mode=aggressive]"):
        run(train, codec="fp32", consistency=policy)


def test_replicas_that_differ_are_noticed() -> None:
    """TernGrad's workers update by themselves; a hash tells where one of them went astray."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        for step in range(101):
            if step == 50 and rank == 1:
                with torch.no_grad():
                    next(model.parameters())[0, 0] += 1e-3
            one_step(model, opt, rank, step)

    with pytest.raises(tw.ProtocolError, match=r"worker [01]: its model differs from worker [01]'s before step 100"):
        run(train, design="terngrad")


# ---- averaged weights


def make_norm(rank: int) -> nn.Module:
    first, relu, last = make(rank).children()
    return nn.Sequential(first, nn.BatchNorm1d(40), relu, last)


def test_averaged_weights_are_those_of_torchs_averaged_model() -> None:
    """Statistics of batch norms too; a checkpoint holds the average."""
    average: Callable[[float], Any] = get_ema_multi_avg_fn  # untyped in torch

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[Weights, Weights]:
        expected = AveragedModel(make_norm(0), multi_avg_fn=average(0.75), use_buffers=True)
        for step in range(5):
            if step == 3:
                with opt.averaged_weights():
                    model.eval()(torch.zeros(2, 12))
                model.train()
                state = opt.state_dict()
                opt.load_state_dict({**state, "averages": {}})
                opt.load_state_dict(state)
            generator = torch.Generator().manual_seed(1000 * step + rank)
            x = torch.randn(16, 12, generator=generator)
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), (x[:, :3] + x[:, 3:6]).argmax(1))
            expected.update_parameters(model)
            loss.backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.sync()
        trained = weights_of(model)
        expected.update_parameters(model)
        model.eval()
        with opt.averaged_weights():
            averaged = weights_of(model)
            with pytest.raises(tw.ProtocolError, match="averaged weights are for evaluation"):
                model(torch.zeros(2, 12)).sum().backward()
            with pytest.raises(tw.ConfigError, match=r"state_dict\(\) inside .* is of the averages: call it outside"):
                opt.state_dict()
        assert equal(weights_of(model), trained)
        for name, value in expected.module.state_dict().items():
            assert torch.equal(value, averaged[name]) or name.endswith("num_batches_tracked"), name
        assert not torch.equal(averaged["0.weight"], trained["0.weight"])
        return trained, averaged

    for policy in ("bsp", "ssp[2,mode=aggressive]"):
        averages = Design(name="fp32", up=FP32, down=FP32, ema=0.75, consistency=policy)
        results, _ = run(train, model=make_norm, design=averages)
        plain, _ = run(steps(5), model=make_norm, design=replace(averages, ema=0.0))
        if policy == "bsp":
            assert equal(results[0][0], plain[0]), "the training does not notice"

    def without(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        with pytest.raises(tw.ConfigError, match="design '3lc' averages no weights"), opt.averaged_weights():
            pass

    run(without, workers=1, design="3lc")


def test_a_closed_optimizer_takes_no_step() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        one_step(model, opt, rank, 0)
        opt.close()
        assert model(torch.zeros(2, 12)).shape == (2, 3), "the model stays usable"
        with pytest.raises(tw.ProtocolError, match="has left the training"):
            opt.step()
        with pytest.raises(tw.ProtocolError, match="has left the training"):
            opt.sync()

    run(train, codec="3lc", workers=1)


def test_traffic_counts_what_was_sent() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, float]:
        for step in range(4):
            one_step(model, opt, rank, step)
        opt.sync()
        return opt.traffic()

    [traffic, _], _ = run(train, codec="fp32")
    values = sum(parameter.numel() for parameter in make(0).parameters())
    assert traffic["values_push"] == traffic["values_pull"] == 4 * values
    assert traffic["payload_bytes_push"] == traffic["payload_bytes_pull"] == 16 * values
    assert traffic["steps"] == 4 and traffic.get("late_pushes", 0) == 0
