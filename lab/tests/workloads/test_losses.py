"""The loss of a recipe against the formula, written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from thinwire_lab.workloads.losses import training_loss
from thinwire_lab.workloads.models import model
from thinwire_lab.workloads.recipes import recipe


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
