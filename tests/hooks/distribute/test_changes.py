"""Gradients and options that change between backward() and step(), or between steps: they count, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, batch, mlp, sgd, values
from thinwire.errors import ConfigError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer

Change = Callable[[nn.Module], Any]
Train = Callable[[int, nn.Module, DistributedOptimizer], torch.Tensor]


def loss_of(model: nn.Module, rank: int, step: int) -> Any:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def steps(change: Change = lambda model: None, count: int = 4) -> Train:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(count):
            opt.zero_grad()
            loss_of(model, rank, step).backward()
            change(model)
            opt.step()
        opt.flush()
        return values(model)

    return train


def clip(norm: float) -> Change:
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), norm)


def clip_values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def halve_one(model: nn.Module) -> None:
    gradient = model.get_parameter("3.weight").grad
    assert gradient is not None
    gradient.detach().mul_(0.5)


def replace_one(model: nn.Module) -> None:
    bias = model.get_parameter("3.bias")
    bias.grad = torch.zeros_like(bias)


def remove_one(model: nn.Module) -> None:
    model.get_parameter("3.bias").grad = None


def test_gradient_changed_after_push_raises_config_error_with_name() -> None:
    cases: list[dict[str, Any]] = [
        {"design": "3lc"},
        {"design": "mem-sgd-topk"},
        {"codec": "fp32", "consistency": "ssp[2]"},
    ]
    for options in cases:
        changes = {
            clip(1e-3): "5 gradients were changed after they had left",
            clip(1e9): "5 gradients",  # which changes no value here, and would in another step
            clip_values: "5 gradients",
            halve_one: r"\('3.weight'\): .*overlap=False",
            replace_one: r"\('3.bias'\)",
            remove_one: r"\('3.bias'\)",
        }
        for change, told in changes.items():
            with pytest.raises(ConfigError, match=told):
                run_cluster(mlp, steps(change), workers=1, optimizer=sgd, **options)


def test_second_backward_pass_raises_and_keeps_residuals() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> bool:
        def residuals() -> list[torch.Tensor]:
            return [each["residual"] for each in opt.state_dict()["contexts"].values() if "residual" in each]

        loss_of(model, rank, 0).backward()
        before = residuals()
        with pytest.raises(ProtocolError, match="pushed twice"):
            loss_of(model, rank, 1).backward()
        same = all(torch.equal(old, new) for old, new in zip(before, residuals(), strict=True))
        with pytest.raises(ConfigError, match="changed after they had left"):
            opt.step()
        opt.step()
        return same and len(before) > 0

    assert run_cluster(lambda rank: nn.Linear(12, 30, bias=False), train, workers=1, codec="3lc")[0] == [True]


@pytest.mark.parametrize("option", ["lr", "momentum"])
def test_option_changed_after_push_raises_and_next_step_succeeds(option: str) -> None:
    def final(overlap: bool) -> Any:
        def work(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
            for step in range(3):
                opt.zero_grad()
                loss_of(model, rank, step).backward()
                opt.param_groups[0][option] = 0.1 * (step + 1)
                if overlap and rank == 0:  # rank 0's learning rates count
                    with pytest.raises(ConfigError, match=r"between backward\(\) and step\(\)"):
                        opt.step()
                opt.step()
            opt.sync()
            return nn.utils.parameters_to_vector(model.parameters()).detach()

        return run_cluster(mlp, work, optimizer=sgd, codec="fp32", overlap=overlap)[0]

    assert torch.equal(*final(False)) and torch.equal(*final(True))


def test_clipping_applies_without_overlap() -> None:
    """By values: a smaller norm alone is nothing to Adam, nor to signs."""
    cases: list[dict[str, Any]] = [
        {"design": "3lc", "overlap": False},
        {"design": "3lc[nonfinite=skip]"},
        {"design": "terngrad"},
        {"codec": "fp32", "overlap": False, "consistency": "adaptive[period,threshold=2]"},
        {"design": "entropy", "consistency": "local[2]"},
        {"design": "update"},
        {"design": "local-sgd[h=2]"},
        {"design": "demo"},
    ]
    for options in cases:
        optimizer = (
            adamw if options["design" if "design" in options else "codec"] in ("update", "local-sgd[h=2]") else sgd
        )
        usual, _ = run_cluster(mlp, steps(), optimizer=optimizer, **options)
        clipped, _ = run_cluster(mlp, steps(clip_values), optimizer=optimizer, **options)
        assert not torch.equal(usual[0], clipped[0]) and torch.equal(clipped[0][:-80], clipped[1][:-80]), (
            "but statistics"
        )
