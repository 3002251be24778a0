"""Several optimizers of one model: as each by itself, as one of torch's, and at workers with local updates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, batch, inner_step, mlp, resume, steps, values
from thinwire.errors import ConfigError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.several import Several, as_one

Optimizers = list[torch.optim.Optimizer]


def both(model: nn.Module) -> Optimizers:
    """Momentum for matrices, AdamW for what is left: an optimizer that has a state, and one that steers."""
    matrices = [each for each in model.parameters() if each.ndim == 2]
    rest = [each for each in model.parameters() if each.ndim < 2]
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


def muon(model: nn.Module) -> Optimizers:
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


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


def test_a_scheduler_finds_the_options_that_all_have() -> None:
    model = mlp(0)
    one = as_one(halves(model))
    torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=10)  # cycles betas
    assert len({group["betas"] for group in one.param_groups}) == 1 and one.defaults["betas"] == (0.9, 0.999)
    assert "momentum" not in as_one(both(model)).defaults and "momentum" not in one.param_groups[1]


def test_a_closure_computes_the_loss_once() -> None:
    model, calls = mlp(0), 0
    one = as_one(both(model))

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        one.zero_grad()
        x, y = batch(0, 0)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    before = values(model)
    with torch.no_grad():
        loss: object = one.step(closure)  # type: ignore[arg-type]
    assert calls == 1 and isinstance(loss, torch.Tensor) and not torch.equal(values(model), before)


def test_a_state_resumes_bit_for_bit_whoever_loads_it() -> None:
    whole, stopped = mlp(0), mlp(0)
    expected, one = as_one(both(whole)), as_one(both(stopped))
    train(whole, expected, range(9))
    train(stopped, one, range(5))
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


class Codes(torch.optim.SGD):
    """An optimizer that keeps codes, and sees by itself that they stay what they are when they are loaded."""

    loaded = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["codes"] = torch.full((3,), 200, dtype=torch.uint8)
        return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded += 1
        super().load_state_dict(state_dict)
        for number, state in state_dict["state"].items():
            parameter = [p for group in self.param_groups for p in group["params"]][number]
            self.state[parameter]["codes"] = state["codes"]


class Hookless(Codes):
    """As some 8-bit ones: it makes its groups anew when it loads, and calls nobody."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = [
            {**given, "params": own["params"]}
            for own, given in zip(self.param_groups, state_dict["param_groups"], strict=True)
        ]
        self.__setstate__({"state": self.state, "param_groups": groups})  # type: ignore[no-untyped-call]


def test_groups_that_are_made_anew_without_a_word_are_the_ones_that_a_scheduler_moves() -> None:
    model = mlp(0)
    first, *others = model.parameters()
    several = Several([torch.optim.AdamW(others, lr=0.1), Hookless([first], lr=0.5)])
    several.load_state_dict(copy.deepcopy(several.state_dict()))
    several.param_groups[1]["lr"] = 0.05
    assert [group["lr"] for each in several.optimizers for group in each.param_groups] == [0.1, 0.05]


def coded(model: nn.Module) -> Optimizers:
    """The second one names its parameters."""
    named = dict(model.named_parameters())
    first, *others = named
    return [Codes([named[first]], lr=0.1), torch.optim.AdamW([(name, named[name]) for name in others], lr=0.01)]


def test_each_saves_and_loads_its_own_in_its_own_way() -> None:
    model = mlp(0)
    one = as_one(coded(model))
    train(model, one, range(2))
    heard: list[str] = []
    own = coded(model)
    again = Several(own)
    for each in (again, own[1]):
        each.register_load_state_dict_pre_hook(lambda *_: heard.append("before"))
        each.register_load_state_dict_post_hook(lambda *_: heard.append("after"))
    saved = one.state_dict()
    assert sorted(saved["state"]) == list(range(len(list(model.parameters()))))
    again.load_state_dict(copy.deepcopy(saved))
    codes = own[0].state[next(model.parameters())]["codes"]
    assert isinstance(own[0], Codes) and own[0].loaded == 1
    assert codes.dtype == torch.uint8 and codes.tolist() == [200] * 3
    assert heard == ["before", "before", "after", "after"]
    before = copy.deepcopy(again.state_dict())
    saved["param_groups"][1]["params"].pop()
    with pytest.raises(ValueError, match="parameter groups of another number or size"):
        again.load_state_dict(saved)
    assert str(again.state_dict()) == str(before)


def test_a_copy_is_made_of_copies() -> None:
    model = mlp(0)
    one = as_one(both(model))
    train(model, one, range(2))
    twin_model, twin = copy.deepcopy((model, one))
    train(model, one, range(2, 4))
    train(twin_model, twin, range(2, 4))
    assert torch.equal(values(model), values(twin_model))
    assert not {id(each) for each in model.parameters()} & {id(p) for g in twin.param_groups for p in g["params"]}


def test_two_halves_of_adamw_train_as_one_does() -> None:
    designs = "local-sgd[h=4,steer=0]"
    [expected, _], _ = run_cluster(mlp, steps(9), optimizer=adamw, design=designs)
    found, _ = run_cluster(mlp, steps(9), optimizer=halves, design=designs)
    for rank, each in enumerate(found):
        assert torch.equal(each, expected), f"worker {rank}"


@pytest.mark.parametrize("design", ["update", "local-sgd[h=4]", "diloco[h=3]"])
def test_muon_and_adamw_together_keep_replicas_equal_and_resume_in_the_middle_of_a_round(design: str) -> None:
    stop, total = 5, 9

    def first(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, Any]:
        for step in range(stop):
            inner_step(model, opt, rank, step)
        opt.sync()
        return copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})

    expected, _ = run_cluster(mlp, steps(total), optimizer=muon, design=design)
    assert torch.equal(*expected) and not torch.equal(expected[0], values(mlp(0)))
    saved, core = run_cluster(mlp, first, optimizer=muon, design=design)
    assert ("steering" in saved[0]["opt"]) == (design == "local-sgd[h=4]"), "AdamW's half steers"
    found = resume(saved, core, design, range(stop, total), optimizer=muon)
    for rank in range(2):
        assert torch.equal(found[rank], expected[rank]), f"worker {rank}"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda m: [], "an empty list of optimizers"),
        (lambda m: iter(both(m)), "a list_iterator is no torch optimizer: give one, or a list of several"),
        (lambda m: [adamw(m), adamw(m)], r"optimizers 0 and 1 both hold a parameter of shape \(40, 12\)"),
        (lambda m: [adamw(m), list(m.parameters())], "a list of optimizers holds a list, which is no torch optimizer"),
        (lambda m: [torch.optim.LBFGS([m[0].weight]), *both(m)], "LBFGS computes the loss again within a step"),
        (lambda m: muon(m)[:1], r"parameter '1.weight' needs .* a list of several optimizers may hold the model's"),
    ],
)
def test_lists_that_cannot_be_are_refused_in_words(make: Callable[[nn.Module], Any], told: str) -> None:
    model = mlp(0)
    with pytest.raises(ConfigError, match=told):
        tw.distribute(model, make(model), server="grpc://127.0.0.1:1", design="update")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "the server runs SGD, .*; SGD and AdamW is none of them; it runs one for all: give one"),
        ({"design": "demo"}, "torch.optim.SGD without momentum and was given SGD and AdamW"),
    ],
)
def test_designs_that_run_one_optimizer_alone_refuse_two(options: dict[str, Any], told: str) -> None:
    model = mlp(0)
    with pytest.raises(ConfigError, match=told):
        tw.distribute(model, both(model), server="grpc://127.0.0.1:1", **options)
