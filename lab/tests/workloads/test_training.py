"""A worker's training: the recipe's loss, clipped gradients, what wraps the model, and copies that go their own way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from thinwire_lab.workloads.losses import training_loss
from thinwire_lab.workloads.models import model
from thinwire_lab.workloads.recipes import recipe
from thinwire_lab.workloads.training import Training, training


class Doubled(nn.Module):
    """What wraps a model is called in its place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)  # type: ignore[no-any-return]


def gradients(made: Training) -> torch.Tensor:
    return torch.cat([each.grad.reshape(-1) for each in made.model.parameters() if each.grad is not None])


def test_the_loss_is_the_recipes() -> None:
    """Through what wraps the model too, whose own parameters are penalised."""
    for name in ("mlp", "mlp-tanh"):
        made = training(recipe(name, "digits"), data="digits", rank=1, workers=2)
        examples = next(made.batches)
        outputs = made.model(examples[0])
        wanted, doubled = (training_loss(made.model, made.recipe, factor * outputs, examples[1]) for factor in (1, 2))
        assert torch.equal(made.backward(examples), wanted.detach())
        assert torch.equal(made.backward(examples, through=Doubled(made.model)), doubled.detach())


def test_gradients_are_clipped_where_they_have_not_left() -> None:
    usual = recipe("mlp", "digits")
    norms = {}
    for clips in (True, False):
        made = training(replace(usual, clip=0.01), data="digits")
        made.backward(clips=clips)
        norms[clips] = float(gradients(made).norm())
    assert norms[True] == pytest.approx(0.01, rel=1e-4) and norms[False] > 0.1


def test_a_copy_goes_its_own_way_from_the_same_place() -> None:
    made = training(replace(recipe("mlp", "digits"), momentum=0.9), data="digits")
    other = made.copy()
    assert other.dataset is made.dataset
    losses = []
    for each in (made, made, other, other):
        each.optimizer.zero_grad()
        losses.append(float(each.backward()))
        each.optimizer.step()
    assert losses[:2] == losses[2:] and losses[0] != losses[1]
    assert torch.equal(gradients(made), gradients(other))


def test_losses_and_the_penalty() -> None:
    network = model("mlp-tanh", num_classes=3, in_shape=(1, 2, 2), seed=0)
    inputs, targets = torch.randn(5, 1, 2, 2, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2, 1, 2, 2])
    outputs = network(inputs).detach()
    wanted = torch.full((5, 3), -1.0)
    wanted[torch.arange(5), targets] = 1.0
    squares = 0.5 * ((outputs.tanh() - wanted) ** 2).sum() / 5
    magnitudes = sum(float(each.detach().abs().sum()) for each in network.parameters() if each.ndim > 1)
    asked = replace(recipe("mlp-tanh", "mnist"), l1=0.25)
    assert asked.loss == "squared-error"
    cases = {
        "both": (asked, float(squares) + 0.25 * magnitudes),
        "no penalty": (replace(asked, l1=0.0), float(squares)),
        "cross-entropy": (replace(asked, l1=0.0, loss="cross-entropy"), float(F.cross_entropy(outputs, targets))),
    }
    for name, (each, expected) in cases.items():
        assert float(training_loss(network, each, outputs, targets).detach()) == pytest.approx(expected, rel=1e-5), name
