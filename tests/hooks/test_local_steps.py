"""Steps of local updates that come in another order than usual: none is lost, and none is taken twice."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, batch, inner_step, mlp, sgd, values
from thinwire.errors import ConfigError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.planning import make_plan
from thinwire.policies.designs import design as find_design

Train = Callable[[int, nn.Module, Any], torch.Tensor]
STREAMING = "streaming-diloco[h=5,fragments=4,delay=0,keep=0,outer_lr=1,outer_momentum=0,nesterov=false,codec=fp32]"


class Heads(nn.Module):
    """Two heads, of which a step takes one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = nn.Linear(12, 16), nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 3)])

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        found: torch.Tensor = self.heads[head](torch.tanh(self.trunk(x)))
        return found


def alternating(rank: int, model: nn.Module, optimizer: Any) -> torch.Tensor:
    """Gradients stay, as zeros, so that momenta move the head that a step leaves out."""
    for step in range(20):
        x, y = batch(rank, step)
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(x, step * 7 // 3 % 2), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return values(model)


def twice(rank: int, model: nn.Module, optimizer: Any) -> torch.Tensor:
    """Every third step is taken again with the gradients that are there, and no forward pass before it."""
    for step in range(9):
        inner_step(model, optimizer, rank, step)
        if step % 3 == 0:
            optimizer.step()
    return values(model)


@pytest.mark.parametrize(
    ("train", "make", "design"),
    [
        (twice, mlp, "update[codec=fp32]"),
        (twice, mlp, "local-sgd[h=3,codec=fp32]"),
        (alternating, lambda _: Heads(), STREAMING),
    ],
    ids=["again, update", "again, local-sgd", "a layer left out"],
)
def test_a_step_before_the_answer_has_come_is_kept(train: Train, make: Callable[[int], nn.Module], design: str) -> None:
    def work(rank: int, model: nn.Module, optimizer: DistributedOptimizer) -> torch.Tensor:
        found = train(rank, model, optimizer)
        optimizer.sync()
        return values(model) if found is not None else found

    [found], _ = run_cluster(make, work, workers=1, optimizer=adamw, design=design)
    alone = make(0)
    torch.testing.assert_close(found, train(0, alone, adamw(alone)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("design", ["diloco[h=4,codec=fp32,outer_momentum=0.6]", "demo[h=4]"])
def test_a_second_flush_trains_nothing(design: str) -> None:
    def work(rank: int, model: nn.Module, optimizer: DistributedOptimizer) -> list[torch.Tensor]:
        seen = []
        for steps in (6, 0, 1, 0):
            for step in range(steps):
                inner_step(model, optimizer, rank, step)
            optimizer.flush()
            seen.append(values(model))
        return seen

    for first, again, more, more_again in run_cluster(mlp, work, workers=2, optimizer=sgd, design=design)[0]:
        assert torch.equal(first, again) and torch.equal(more, more_again) and not torch.equal(first, more)


def test_states_of_shared_weights_and_rates_that_nobody_would_take_are_refused() -> None:
    def work(rank: int, model: nn.Module, optimizer: DistributedOptimizer) -> None:
        inner_step(model, optimizer, rank, 0)
        with optimizer.shared_weights(), pytest.raises(ConfigError, match=r"inside `with opt.shared_weights\(\):`"):
            optimizer.state_dict()
        optimizer.param_groups[1]["lr"] = 0.5
        with pytest.raises(ConfigError, match=r"its groups have \[0.01, 0.5\]: give all groups one rate"):
            optimizer.step()

    def groups(model: nn.Module) -> torch.optim.Optimizer:
        first, *others = model.parameters()
        return torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.01)

    run_cluster(mlp, work, workers=1, optimizer=groups, design="demo")


def test_whole_weights_cannot_leave_before_the_step() -> None:
    with pytest.raises(ConfigError, match="transmission=traditional"):
        find_design("entropy", transmission="wait-free")


def test_hooks_of_an_optimizer_that_servers_run_are_refused() -> None:
    model = mlp(0)
    hooked = sgd(model)
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="has hooks for its steps"):
        make_plan(model, hooked, find_design("3lc"), workers=2)
    make_plan(model, hooked, find_design("update"), workers=2)


def test_parameters_without_a_dimension_accumulate() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    def work(rank: int, model: nn.Module, optimizer: DistributedOptimizer) -> float:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        optimizer.sync()
        return float(next(model.parameters()).detach())

    found, _ = run_cluster(
        lambda _: Scaled(), work, workers=2, optimizer=sgd, design="fp32", consistency="local[steps=2]"
    )
    assert found == pytest.approx([1 - 4 * 0.01 * 3] * 2)


def test_a_worker_that_has_left_is_not_waited_for_where_scales_are_shared() -> None:
    def work(rank: int, model: nn.Module, optimizer: DistributedOptimizer) -> str:
        try:
            for step in range(2 + rank):
                inner_step(model, optimizer, rank, step)
            optimizer.sync()
        except ProtocolError as error:
            return str(error)
        return "at the end"

    (first, second), _ = run_cluster(mlp, work, workers=2, optimizer=sgd, design="terngrad", timeout_s=20)
    assert first == "at the end" and "worker 0 has left before step 2" in second


@pytest.mark.parametrize(
    "given", [{"rank": 0}, {"workers": 2}, {"rank": "0", "workers": 2}, {"rank": True, "workers": 2}]
)
def test_rank_and_workers_go_together(given: dict[str, Any]) -> None:
    model = mlp(0)
    with pytest.raises(ConfigError, match="give both as whole numbers, as in rank=0, workers=4"):
        tw.distribute(model, sgd(model), server="grpc://127.0.0.1:1", **given)


def test_what_is_in_the_wrong_place_is_named() -> None:
    model = mlp(0)
    swapped: Any = sgd(model)
    with pytest.raises(ConfigError, match="a SGD is no model: the model comes first"):
        tw.distribute(swapped, model, server="grpc://127.0.0.1:1")  # type: ignore[arg-type]
    excluded: Any = "0.weight"
    with pytest.raises(ConfigError, match=r"exclude='0.weight'; it is called with every tensor's name and shape"):
        tw.distribute(model, sgd(model), server="grpc://127.0.0.1:1", exclude=excluded)


def test_a_design_and_a_codec_are_one_too_many() -> None:
    model = mlp(0)
    with pytest.raises(ConfigError, match="design='3lc' brings its codecs; codec=… would change them"):
        tw.distribute(model, sgd(model), server="grpc://127.0.0.1:1", design="3lc", codec="int8")
    for name, said in (("3lc", "3lc[nonfinite=skip]"), ("local-sgd[h=4]", "local-sgd[h=4,nonfinite=skip]")):
        with pytest.raises(ConfigError, match=re.escape(f"and their options; write design={said!r}")):
            tw.distribute(model, sgd(model), server="grpc://127.0.0.1:1", design=name, nonfinite="skip")
        assert find_design(said).up.nonfinite == "skip"
