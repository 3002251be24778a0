"""Several optimizers of one model: as each by itself, as one of torch's, and as the inner one of local updates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, batch, inner_step, mlp, steps, values
from thinwire.hooks.several import Several, as_one

Optimizers = list[torch.optim.Optimizer]


def both(model: nn.Module) -> Optimizers:
    """Momentum for matrices, AdamW for what is left: an optimizer that has a state, and one that steers."""
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


def halves(model: nn.Module) -> Optimizers:
    first, *others = model.parameters()
    return [torch.optim.AdamW(each, lr=0.01, weight_decay=0.1) for each in ([first], others)]


def train(model: nn.Module, optimizer: Any, those: range) -> None:
    for step in those:
        inner_step(model, optimizer, 0, step)


def test_each_takes_its_own_step_and_a_scheduler_of_the_whole_reaches_all() -> None:
    apart, together = mlp(0), mlp(0)
    of_apart, one = both(apart), as_one(both(together))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (*of_apart, one)]
    for step in range(6):
        x, y = batch(0, step)
        for model, optimizers in ((apart, of_apart), (together, [one])):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert torch.equal(values(apart), values(together))
    assert {len(one.state[each]) for each in together.parameters()} == {1, 3}
    assert len(one.state) == len(list(together.parameters()))


def test_a_state_resumes_bit_identical_whether_the_whole_or_each_part_loads_it() -> None:
    whole, stopped = mlp(0), mlp(0)
    expected, one = as_one(both(whole)), as_one(both(stopped))
    train(whole, expected, range(9))
    train(stopped, one, range(5))
    twin_model, twin = copy.deepcopy((stopped, one))
    weights, saved = copy.deepcopy((stopped.state_dict(), one.state_dict()))
    parts = copy.deepcopy([each.state_dict() for each in one.optimizers])  # type: ignore[attr-defined]
    for loads in ("whole", "parts"):
        again = mlp(0)
        again.load_state_dict(weights)
        own = both(again)
        several = Several(own)
        groups = several.param_groups
        if loads == "whole":
            several.load_state_dict(copy.deepcopy(saved))
        else:
            for each, part in zip(own, parts, strict=True):
                each.load_state_dict(copy.deepcopy(part))
        assert several.param_groups[0] is own[0].param_groups[0]
        assert groups is several.param_groups
        train(again, several, range(5, 9))
        assert torch.equal(values(again), values(whole)), loads
    train(twin_model, twin, range(5, 9))
    assert torch.equal(values(twin_model), values(whole)), "a copy is made of copies"
    assert not {id(each) for each in stopped.parameters()} & {id(p) for g in twin.param_groups for p in g["params"]}


@pytest.mark.parametrize("design", ["local-sgd[h=4,steer=0]", "local-sgd[h=2,codec=fp32,steer=0.6]"])
def test_two_halves_of_adamw_train_and_are_steered_as_one_is(design: str) -> None:
    one, two = (run_cluster(mlp, steps(9), optimizer=optimizer, design=design)[0] for optimizer in (adamw, halves))
    assert all(map(torch.equal, one, two))
