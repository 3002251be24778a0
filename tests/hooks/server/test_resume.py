"""Workers and shards that resume from their states: bit for bit, with a warning of losses, or with an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import again, run_cluster
from tests.hooks.server_runs import Train, Weights, equal, mlp, normed, parameters_of, steps, weights_of
from tests.hooks.server_runs import run as run_workers
from thinwire.errors import ConfigError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.random_states import random_states, set_random_states
from thinwire.runtime.metrics import Prometheus
from thinwire.server.core import ServerCore


def saved(count: int) -> Train:
    """Trains, and returns parameters, buffers and the optimizer's state."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[Weights, dict[str, Any]]:
        steps(count)(rank, model, opt)
        return weights_of(model), copy.deepcopy(opt.state_dict())

    return train


def run(
    core: ServerCore | None, train: Train, make: Callable[[int], nn.Module] = mlp, **options: Any
) -> tuple[Any, ServerCore]:
    [result], after = run_cluster(make, train, workers=1, core=core, **options)
    return result, after


def loaded(make: Callable[[int], nn.Module], weights: Weights) -> Callable[[int], nn.Module]:
    def resumed(rank: int) -> nn.Module:
        model = make(rank)
        getattr(model, "_orig_mod", model).load_state_dict(weights)
        return model

    return resumed


@pytest.mark.parametrize(
    ("design", "policy"),
    [
        ("mem-sgd-1bit", "bsp"),
        ("mem-sgd-topk", "local[2]"),
        ("topk-sgd", "ssp[2]"),
        ("mem-sgd-topk", "adaptive[period,threshold=2]"),
    ],
)
def test_resume_with_state_at_workers_is_bit_identical(design: str, policy: str) -> None:
    """Momentum, residuals and what accumulated are the workers'; the shard begins anew."""

    def whole(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Weights:
        steps(8)(rank, model, opt)
        opt.flush()
        return weights_of(model)

    def rest(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Weights:
        opt.load_state_dict(states[rank][1])
        assert opt.steps_done == 3
        return whole(rank, model, opt)

    options: dict[str, Any] = {"design": design, "consistency": policy}
    expected, _ = run_workers(whole, **options)
    states, _ = run_workers(saved(3), **options)
    _, state = states[0]
    if policy == "local[2]":
        assert any(buffers["momentum_buffer"] is not None for buffers in state["optimizer"]["state"].values())
        assert state["contexts"]["0.bias"]["accumulated_iterations"] == 1
        assert state["contexts"]["0.bias"]["accumulated"].abs().max() > 0
    resumed, _ = run_workers(rest, model=lambda rank: loaded(mlp, states[rank][0])(rank), **options)
    assert all(map(equal, resumed, expected))


@pytest.mark.parametrize("design", ["3lc[s=1.0]", "doublesqueeze-1bit"])
def test_resume_takes_weights_from_shard_or_state(design: str) -> None:
    """The model is not loaded here: the shard's copy, or the one in the state, must be enough."""
    (weights, state), core = run(None, saved(3), design=design)
    assert state["position"]["clock"] == 3 and ("values" in state["position"]) == (design != "3lc[s=1.0]")

    def look(_rank: int, model: nn.Module, opt: DistributedOptimizer) -> Weights:
        assert opt.steps_done == opt.clock == 3
        return parameters_of(model)

    assert equal(run(again(core), look, design=design, resume=state)[0], weights)


@pytest.mark.parametrize("design", ["3lc", "fp32", "doublesqueeze-1bit", "update"])
def test_resume_keeps_workers_own_statistics(design: str) -> None:
    """A shard has buffers as they were sent last, which is once in fifty exchanges."""
    there: list[Any] = []

    def whole(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Weights:
        there.extend((*saved(3)(rank, model, opt), again(core)))
        steps(6)(rank, model, opt)
        return weights_of(model)

    core = ServerCore()
    wanted, _ = run(core, whole, normed, design=design)
    weights, state, shard = there
    (found, _), _ = run(shard, saved(6), loaded(normed, weights), design=design, resume=state)
    assert equal(found, wanted)


# ---- what is lost, and what is refused


def test_resume_with_different_steps_raises_and_closes_connections() -> None:
    (_, state), core = run(None, saved(3), codec="3lc")
    writer = Prometheus(0)
    with pytest.raises(ConfigError, match="resumes at exchange 3, and the shards are at 0"):
        run(None, saved(3), codec="3lc", resume=state, metrics=[writer])
    Prometheus(writer.port).close()  # its port is free for the next try
    other = {**state, "position": {**state["position"], "clock": 2}}
    with pytest.raises(ConfigError, match="resumes at exchange 2, and the shards are at 3"):
        run(again(core), saved(3), codec="3lc", resume=other)


def test_resume_without_worker_state_warns_of_losses() -> None:
    (weights, state), core = run(None, saved(3), codec="3lc")

    def look(_rank: int, model: nn.Module, opt: DistributedOptimizer) -> float:
        assert opt.clock == opt.steps_done == 3 and equal(parameters_of(model), weights)
        return opt.counters["residuals_lost"]

    with pytest.warns(UserWarning, match="worker 0 has no state and resumes at the shards' exchange 3"):
        lost, _ = run(again(core), look, codec="3lc")
    assert lost == sum("residual" in context for context in state["contexts"].values()) > 0


LACKED = ("rank", "position", "optimizer")


def test_states_of_another_rank_or_model_raise_before_any_change() -> None:
    (_, state), core = run(None, saved(3), design="doublesqueeze-1bit")
    position = state["position"]
    of_shards = {**state, "position": {**position, "versions": 2 * position["versions"]}}
    values = {**position["values"], "0.bias": torch.zeros(7)}
    of_shapes = {**state, "position": {**position, "values": values}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({**state, "rank": 1}, "of rank 1, and this is rank 0"),
        (of_shards, "2 shards, this one has 1"),
        (of_shapes, r"\['0.bias'\] have \[40\] values here and \[7\]"),
        *(
            (
                {key: state[key] for key in state if key != lacked},
                f"lacks '{lacked}'|missing required field `{lacked}`|has NoneType",
            )
            for lacked in LACKED
        ),
    ]
    for resume, named in cases:
        with pytest.raises(tw.ConfigError, match=named):
            run(again(core), saved(3), design="doublesqueeze-1bit", resume=resume)

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        own = saved(1)(rank, model, opt)[1]
        for short in ({}, {"0.weight": own["contexts"]["0.weight"]}):
            with pytest.raises(tw.ConfigError, match=r"no residual for '0\."):
                opt.load_state_dict({**own, "contexts": short, "step": 99})
        assert opt.steps_done == 1
        assert torch.equal(
            opt.state_dict()["contexts"]["0.weight"]["residual"], own["contexts"]["0.weight"]["residual"]
        )

    run(None, train, codec="3lc")


def test_random_states_of_host_and_gpus_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    state = random_states(torch.nn.Linear(2, 2))
    drawn = torch.rand(3)
    set_random_states(state)
    assert torch.equal(torch.rand(3), drawn) and list(state) == ["cpu"]
    kept: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor([int(device[-1])]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: kept.update({device: state}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    on = [SimpleNamespace(is_cuda=True, device=torch.device(f"cuda:{at}")) for at in (2, 1, 1)]
    model: Any = SimpleNamespace(parameters=lambda: [*on, SimpleNamespace(is_cuda=False)])
    state = random_states(model)
    assert list(state) == ["cpu", "cuda:1", "cuda:2"]
    set_random_states(state)
    assert list(kept) == ["cuda:1"] and kept["cuda:1"].item() == 1
