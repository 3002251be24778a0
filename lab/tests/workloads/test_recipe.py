"""Schedules, optimizers and clipping follow a recipe; one that cannot be is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire_lab.workloads.models import model
from thinwire_lab.workloads.recipe import build_optimizer, clip_gradients, param_groups, schedule
from thinwire_lab.workloads.recipes import recipe


def test_schedules() -> None:
    base = recipe("mlp", "digits")
    points = [schedule(base, p / 100) for p in range(101)]
    assert points[0] == 0.02 and points[-1] == pytest.approx(0.0002)
    assert points == sorted(points, reverse=True)
    assert points[25] == pytest.approx(0.0002 + 0.0198 * (1 + math.cos(math.pi / 4)) / 2)
    step = replace(base, schedule="step", final=0.1)
    assert [schedule(step, p) for p in (0.0, 0.66, 0.67, 1.0)] == pytest.approx([0.02, 0.02, 0.002, 0.002])
    assert schedule(replace(base, schedule="constant"), 1.0) == 0.02
    root = replace(base, schedule="polynomial", final=0.0)
    assert [schedule(root, p) for p in (0.0, 0.75, 1.0)] == pytest.approx([0.02, 0.01, 0.0])
    warm = replace(base, warmup=0.1)
    assert schedule(warm, 0.0) == pytest.approx(0.0002) and schedule(warm, 0.1) == pytest.approx(0.02)
    assert schedule(warm, 0.05) == pytest.approx(0.0101) and schedule(warm, 1.0) == pytest.approx(0.0002)
    line = replace(base, schedule="linear", warmup=0.1, final=0.1)
    assert [schedule(line, p) for p in (0.0, 0.1, 0.55, 1.0)] == pytest.approx([0.002, 0.02, 0.011, 0.002])
    falling = replace(base, schedule="exponential", final=0.01)
    assert [schedule(falling, p) for p in (0.0, 0.5, 1.0)] == pytest.approx([0.02, 0.002, 0.0002])
    assert schedule(base, -1.0) == 0.02 and schedule(base, 7.0) == schedule(base, 1.0)


def test_impossible_recipes() -> None:
    for change in [
        {"lr": 0.0},
        {"lr": math.nan},
        {"batch": 0},
        {"workers": 0},
        {"steps": -1},
        {"final": 1.5},
        {"warmup": 1.0},
        {"momentum": 1.0},
        {"weight_decay": -1e-4},
        {"schedule": "stairs"},
        {"loss": "hinge"},
        {"l1": -1.0},
        {"optimizer": "Lion"},
        {"betas": (0.9, 1.0)},
        {"clip": 0.0},
    ]:
        with pytest.raises(ConfigError):
            replace(recipe("mlp", "digits"), **change)  # type: ignore[arg-type]


def test_only_matrices_decay() -> None:
    net = model("resnet8", num_classes=10, in_shape=(1, 28, 28), seed=0)
    matrices, vectors = param_groups(net, recipe("resnet8", "fashion-mnist"))
    assert matrices["weight_decay"] == 1e-4 and vectors["weight_decay"] == 0.0
    assert isinstance(matrices["params"], list) and isinstance(vectors["params"], list)
    assert sum(p.numel() for p in matrices["params"]) == 42_060
    assert sum(p.numel() for p in vectors["params"]) == 370
    for parameter in net.parameters():
        parameter.requires_grad_(parameter.ndim > 1)
    assert len(param_groups(net, recipe("resnet8", "fashion-mnist"))) == 1


def test_optimizers() -> None:
    net = model("mlp", num_classes=10, in_shape=(1, 8, 8), seed=0)
    sgd = build_optimizer(net, recipe("mlp", "digits"))
    assert isinstance(sgd, torch.optim.SGD)
    assert all(group["momentum"] == 0.9 and group["lr"] == 0.02 for group in sgd.param_groups)
    adam = build_optimizer(net, replace(recipe("mlp", "digits"), optimizer="Adam"))
    assert isinstance(adam, torch.optim.Adam)
    changed = replace(recipe("mlp", "digits"), optimizer="AdamW", betas=(0.8, 0.9), clip=0.5)
    adamw = build_optimizer(net, changed)
    assert type(adamw) is torch.optim.AdamW and adamw.param_groups[0]["betas"] == (0.8, 0.9)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    clip_gradients(net, recipe("mlp", "digits"))
    assert all(parameter.grad is not None and bool((parameter.grad == 1).all()) for parameter in net.parameters())
    clip_gradients(net, changed)
    norms = [parameter.grad.norm() for parameter in net.parameters() if parameter.grad is not None]
    assert torch.stack(norms).norm().item() == pytest.approx(0.5, rel=1e-4)
