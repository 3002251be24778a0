"""Recipes have the measured settings, and the digits recipe learns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire_lab.workloads.batches import Batches
from thinwire_lab.workloads.data import datasets
from thinwire_lab.workloads.evaluate import cross_entropy, evaluate
from thinwire_lab.workloads.images import digits
from thinwire_lab.workloads.models import TEXT_MODELS, model, models
from thinwire_lab.workloads.recipe import Recipe, build_optimizer, clip_gradients, param_groups, schedule
from thinwire_lab.workloads.recipes import recipe


def test_measured_and_prescribed_numbers() -> None:
    for name, data, design, lr, workers, batch, steps in [
        ("mlp", "digits", None, 0.02, 4, 8, 3000),
        ("mlp", "digits", "mps", 0.1, 4, 8, 1500),
        ("lenet5", "fashion-mnist", "3lc[s=1.75]", 0.02, 4, 16, 8000),
        ("lenet5", "fashion-mnist", "3lc[zero_run=false, sparsity=1.9]", 0.01, 4, 16, 8000),
        ("resnet8", "fashion-mnist", None, 0.05, 4, 16, 4000),
        ("resnet110", "cifar10", "3lc[s=1.0]", 1.0, 10, 32, 25_600),
        ("cifarnet", "cifar10[crop=24]", "terngrad[last_layer=same]", 2e-4, 2, 64, 300_000),
    ]:
        found = recipe(name, data, design=design)
        assert (found.lr, found.workers, found.batch, found.steps) == (lr, workers, batch, steps)


def test_common_settings_and_the_two_families() -> None:
    momentum = recipe("lenet5", "fashion-mnist", design="terngrad")
    assert (momentum.momentum, momentum.weight_decay, momentum.schedule, momentum.final) == (0.9, 1e-4, "cosine", 0.01)
    plain = recipe("lenet5", "fashion-mnist", design="mem-sgd-1bit")
    assert (plain.momentum, plain.weight_decay, plain.schedule, plain.final) == (0.0, 0.0, "step", 0.1)
    text = recipe("byte-transformer-1m", "python-text")
    assert (text.optimizer, text.betas, text.weight_decay, text.clip) == ("AdamW", (0.9, 0.95), 0.1, 1.0)
    assert (text.workers, text.batch, text.steps, text.context) == (4, 4, 1000, 96)
    assert text.warmup * text.steps == pytest.approx(30) and text.schedule == "linear"
    paper = recipe("cifarnet", "cifar10", design="terngrad")
    assert (paper.optimizer, paper.weight_decay, paper.dropout) == ("Adam", 0.004, 0.0)
    assert recipe("resnet110", "cifar10").augment and not recipe("resnet8", "fashion-mnist").augment


def test_every_possible_pair_has_a_recipe() -> None:
    texts = ["python-text", "quotations"]
    images = [info.name for info in datasets() if info.name not in texts]
    for name in models():
        for data in texts if name in TEXT_MODELS else images:
            for design in (None, "3lc[s=1.9]", "doublesqueeze-topk"):
                found = recipe(name, data, design=design)
                assert (found.model, found.data) == (name, data)
                assert found.augment == (data == "cifar10")
                if data == "digits":
                    assert found.workers * found.batch <= 64
    assert recipe("lenet", "mnist").steps == recipe("lenet5", "fashion-mnist").steps
    assert recipe("resnet20", "cifar10").lr == 1.0
    assert recipe("resnet20", "fashion-mnist").lr == 0.1 and not recipe("resnet20", "fashion-mnist").scales


def test_recipe_impossible_pairs_raise_config_error() -> None:
    for name, data in [("vgg", "digits"), ("mlp", "imagenet"), ("mlp", "python-text"), ("byte-transformer", "mnist")]:
        with pytest.raises(ConfigError):
            recipe(name, data)
    for change in [{"lr": math.nan}, {"batch": 0}, {"warmup": 1.0}, {"schedule": "stairs"}, {"optimizer": "Lion"}]:
        with pytest.raises(ConfigError):
            replace(recipe("mlp", "digits"), **change)  # type: ignore[arg-type]


def _train(recipe: Recipe, seed: int) -> tuple[torch.nn.Module, float]:
    """All workers' batches in one process: the mean gradient of equal batches is the gradient of all."""
    dataset = digits()
    net = model(recipe.model, num_classes=10, in_shape=dataset.in_shape, seed=seed)
    optimizer = build_optimizer(net, recipe)
    streams = [
        Batches(dataset, rank=rank, workers=recipe.workers, batch=recipe.batch, seed=seed)
        for rank in range(recipe.workers)
    ]
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule(recipe, step / recipe.steps)
        parts = [next(stream) for stream in streams]
        loss = cross_entropy(net(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts]))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return net, evaluate(net, dataset).accuracy


def test_digits_recipe_learns_in_a_tenth_of_its_steps() -> None:
    short = replace(recipe("mlp", "digits"), steps=300)
    net, accuracy = _train(short, seed=0)
    again, _ = _train(short, seed=0)
    assert accuracy > 0.94
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


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
    line = replace(base, schedule="linear", warmup=0.1, final=0.1)
    assert [schedule(line, p) for p in (0.0, 0.1, 0.55, 1.0)] == pytest.approx([0.002, 0.02, 0.011, 0.002])
    falling = replace(base, schedule="exponential", final=0.01)
    assert [schedule(falling, p) for p in (0.0, 0.5, 1.0)] == pytest.approx([0.02, 0.002, 0.0002])
    assert schedule(base, -1.0) == 0.02 and schedule(base, 7.0) == schedule(base, 1.0)


def test_optimizer_decays_matrices_alone_and_clips() -> None:
    net = model("mlp", num_classes=10, in_shape=(1, 8, 8), seed=0)
    matrices, vectors = param_groups(net, recipe("resnet8", "fashion-mnist"))
    assert matrices["weight_decay"] == 1e-4 and vectors["weight_decay"] == 0.0
    sgd = build_optimizer(net, recipe("mlp", "digits"))
    assert isinstance(sgd, torch.optim.SGD)
    assert all(group["momentum"] == 0.9 and group["lr"] == 0.02 for group in sgd.param_groups)
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
