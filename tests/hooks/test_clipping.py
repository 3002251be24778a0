"""Gradients that change between backward() and step(): refused where they have left by then, and what is no change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, batch, mlp, sgd, values
from thinwire.errors import ConfigError
from thinwire.hooks.distribute import DistributedOptimizer

Change = Callable[[nn.Module], Any]
Train = Callable[[int, nn.Module, DistributedOptimizer], torch.Tensor]


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def steps(change: Change = lambda model: None, count: int = 4) -> Train:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(count):
            opt.zero_grad()
            loss_of(model, rank, step).backward()  # type: ignore[no-untyped-call]
            change(model)
            opt.step()
        opt.flush()
        return values(model)

    return train


def clip(norm: float) -> Change:
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), norm)


def halve_one(model: nn.Module) -> None:
    gradient = model.get_parameter("3.weight").grad
    assert gradient is not None
    gradient.detach().mul_(0.5)


def replace_one(model: nn.Module) -> None:
    bias = model.get_parameter("3.bias")
    bias.grad = torch.zeros_like(bias)


def remove_one(model: nn.Module) -> None:
    model.get_parameter("3.bias").grad = None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (clip(1e-3), r"5 gradients were changed after they had left \('3.bias', .*, …\)"),
        (clip(1e9), "5 gradients were changed"),  # of which nothing is left to be seen, in another step there would be
        (lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3), "5 gradients were changed"),
        (halve_one, r"1 gradients were changed after they had left \('3.weight'\): .*Give tw.*overlap=False"),
        (replace_one, r"\('3.bias'\)"),
        (remove_one, r"\('3.bias'\)"),
    ],
)
def test_a_gradient_that_is_changed_after_it_left_is_refused(change: Change, told: str) -> None:
    for options in ({"design": "3lc"}, {"design": "mem-sgd-topk"}, {"codec": "fp32", "consistency": "ssp[2]"}):
        with pytest.raises(ConfigError, match=told):
            run_cluster(mlp, steps(change), workers=1, optimizer=sgd, **options)  # type: ignore[arg-type]


def test_gradients_that_were_summed_up_after_the_backward_pass_that_sent_them() -> None:
    """The second pass would count on no other worker."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        loss_of(model, rank, 0).backward()  # type: ignore[no-untyped-call]
        with opt.no_sync():
            loss_of(model, rank, 1).backward()  # type: ignore[no-untyped-call]
        opt.step()

    with pytest.raises(ConfigError, match="5 gradients were changed after they had left"):
        run_cluster(mlp, train, workers=1, optimizer=sgd, design="3lc")


@pytest.mark.parametrize(
    "options",
    [
        {"design": "3lc", "overlap": False},
        {"design": "3lc[nonfinite=skip]"},
        {"design": "terngrad"},
        {"codec": "fp32", "overlap": False, "consistency": "adaptive[period,threshold=2]"},
        {"design": "entropy", "steps_per_epoch": 2},
    ],
)
def test_clipping_has_its_effect_where_gradients_leave_at_the_end_of_the_step(options: dict[str, Any]) -> None:
    usual, _ = run_cluster(mlp, steps(), optimizer=sgd, **options)
    clipped, _ = run_cluster(mlp, steps(clip(1e-3)), optimizer=sgd, **options)
    assert not torch.equal(usual[0], clipped[0])


@pytest.mark.parametrize("design", ["update", "local-sgd[h=2]", "demo"])
def test_local_updates_clip_as_they_like(design: str) -> None:
    """It has its effect, by values: a smaller norm alone is nothing to Adam, nor to signs."""
    optimizer = sgd if design == "demo" else adamw
    usual, clipped = (
        run_cluster(mlp, steps(change), optimizer=optimizer, design=design)[0]
        for change in (lambda model: None, lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3))
    )
    assert torch.equal(*clipped) and not torch.equal(usual[0], clipped[0])


class Shared(nn.Module):
    """A weight that is used twice, one that is frozen, one that is never used, one whose hook clips in time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)
        self.again = nn.Linear(12, 12, bias=False)
        self.again.weight = self.inner.weight
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.unused = nn.Linear(12, 12)
        self.last = nn.Linear(12, 3)
        self.last.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return self.last(self.frozen(self.again(x.relu())).relu())  # type: ignore[no-any-return]


def shared(rank: int) -> nn.Module:
    torch.manual_seed(0)
    return Shared()


@pytest.mark.parametrize(
    "options",
    [
        {"design": "3lc"},
        {"codec": "fp32", "consistency": "local[2]"},
        {"design": "mem-sgd-topk", "consistency": "adaptive[period,threshold=3]"},
        {"codec": tw.codec("topk", fraction=0.1)},
        {"design": "3lc[nonfinite=skip]"},
    ],
)
@pytest.mark.parametrize("to_none", [True, False])
def test_what_is_no_change_is_not_refused(options: dict[str, Any], to_none: bool) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(12):
            opt.zero_grad(set_to_none=to_none)
            opt.zero_grad(set_to_none=to_none)
            with opt.no_sync() if step % 3 == 0 else nullcontext():
                loss_of(model, rank, step).backward()  # type: ignore[no-untyped-call]
            if step % 3 == 0:
                clip(0.5)(model)  # of what is not sent yet
                loss_of(model, rank, 100 + step).backward()  # type: ignore[no-untyped-call]
            if step % 4 == 1:  # a gradient that nobody stores
                torch.autograd.grad(loss_of(model, rank, step), list(model.parameters())[:1])
            opt.step()
        opt.flush()
        return values(model)

    found, _ = run_cluster(shared, train, optimizer=sgd, **options)
    assert torch.equal(*found)


def test_a_closure_that_computes_the_gradients() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(4):

            def closure(step: int = step) -> torch.Tensor:
                opt.zero_grad()
                loss = loss_of(model, rank, step)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            opt.step(closure)
        opt.sync()
        return values(model)

    found, _ = run_cluster(mlp, train, optimizer=sgd, design="3lc")
    usual, _ = run_cluster(mlp, steps(), optimizer=sgd, design="3lc")
    assert torch.equal(found[0], usual[0])
