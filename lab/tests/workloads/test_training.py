"""A worker's training: loss, clipped gradients, wrapped models, and copies."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from thinwire.errors import ConfigError
from thinwire_lab.workloads.dropout import MODELS, Dropout, add_dropout, check_dropout
from thinwire_lab.workloads.evaluate import evaluate, training_loss
from thinwire_lab.workloads.images import digits
from thinwire_lab.workloads.models import model, models
from thinwire_lab.workloads.recipes import recipe
from thinwire_lab.workloads.training import Training, training


class Doubled(nn.Module):
    """A wrapper around a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)  # type: ignore[no-any-return]


def gradients(made: Training) -> torch.Tensor:
    return torch.cat([each.grad.reshape(-1) for each in made.model.parameters() if each.grad is not None])


def test_training_loss_follows_the_recipe() -> None:
    """The penalty counts the model's parameters, through a wrapper too."""
    for name in ("mlp", "mlp-tanh"):
        made = training(recipe(name, "digits"), data="digits", rank=1, workers=2)
        examples = next(made.batches)
        outputs = made.model(examples[0])
        wanted, doubled = (training_loss(made.model, made.recipe, factor * outputs, examples[1]) for factor in (1, 2))
        assert torch.equal(made.backward(examples), wanted.detach())
        assert torch.equal(made.backward(examples, through=Doubled(made.model)), doubled.detach())


def test_training_clips_unsent_gradients_alone() -> None:
    usual = recipe("mlp", "digits")
    norms = {}
    for clips in (True, False):
        made = training(replace(usual, clip=0.01), data="digits")
        made.backward(clips=clips)
        norms[clips] = float(gradients(made).norm())
    assert norms[True] == pytest.approx(0.01, rel=1e-4) and norms[False] > 0.1


def test_training_copy_is_independent() -> None:
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


def test_losses_by_hand() -> None:
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


class _AlwaysThree(nn.Module):
    """Logit ln 9 for class 3 and 0 for the other nine: probability one half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(x), 10)
        logits[:, 3] = math.log(9)
        return logits


def test_evaluate_by_hand() -> None:
    dataset = digits()
    threes = int((dataset.test_y == 3).sum())
    score = evaluate(_AlwaysThree(), dataset, batch=7)
    assert score.accuracy == threes / 450
    expected = (threes * math.log(2) + (450 - threes) * math.log(18)) / 450
    assert score.loss == pytest.approx(expected, rel=1e-6)


SHAPE = (1, 28, 28)


def made(name: str, share: float = 0.5, *, seed: int = 0, rank: int = 0) -> nn.Module:
    network = model(name, num_classes=10, in_shape=SHAPE, seed=0)
    add_dropout(network, share, seed=seed, rank=rank)
    return network


def test_dropout_is_behind_hidden_layers_and_keeps_names() -> None:
    counts = {"mlp": 2, "mlp-tanh": 2, "mlp-5m": 3, "lenet5": 2, "lenet": 1, "cifarnet": 2}
    assert tuple(counts) == MODELS and set(MODELS) <= set(models())
    for name, count in counts.items():
        with_it, without = made(name), made(name, 0.0)
        assert sum(isinstance(each, Dropout) for each in with_it.modules()) == count, name
        assert [key for key, _ in with_it.named_parameters()] == [key for key, _ in without.named_parameters()]
        inputs = torch.rand(3, *SHAPE)
        assert torch.equal(with_it.eval()(inputs), without.eval()(inputs)), name
    for name in set(models()) - set(MODELS):
        check_dropout(name, 0.0)
        with pytest.raises(ConfigError, match="has no place for it"):
            check_dropout(name, 0.5)


def test_dropout_masks_differ_by_worker_and_resume() -> None:
    inputs = torch.rand(4, *SHAPE)
    runs = {key: made("mlp", seed=key[0], rank=key[1])(inputs) for key in ((0, 0), (0, 1), (1, 0))}
    outputs = list(runs.values())
    assert not any(torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])
    assert torch.equal(made("mlp")(inputs), runs[0, 0]), "the same seed and rank"
    network = made("mlp")
    network(inputs)
    state = network.state_dict()
    after, torch_before = network(inputs), torch.get_rng_state()
    again = made("mlp", seed=9)
    again.load_state_dict(state)
    assert torch.equal(again(inputs), after)
    assert torch.equal(torch.get_rng_state(), torch_before), "torch's own chance is not touched"
