"""Scores, checked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from thinwire_lab.workloads.digits import digits
from thinwire_lab.workloads.evaluate import cross_entropy, evaluate


class _AlwaysThree(nn.Module):
    """Logit ln 9 for class 3 and 0 for the other nine: probability one half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(x), 10)
        logits[:, 3] = math.log(9)
        return logits


def test_accuracy_and_loss_by_hand() -> None:
    dataset = digits()
    threes = int((dataset.test_y == 3).sum())
    score = evaluate(_AlwaysThree(), dataset, batch=7)
    assert score.accuracy == threes / 450
    expected = (threes * math.log(2) + (450 - threes) * math.log(18)) / 450
    assert score.loss == pytest.approx(expected, rel=1e-6)


def test_the_model_is_left_as_it_was() -> None:
    for training in [True, False]:
        net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 10)).train(training)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        evaluate(net, digits())
        assert net.training is training
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        assert all(parameter.grad is None for parameter in net.parameters())


def test_text_loss_is_the_mean_over_positions() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(10).view(2, 5) % 7
    by_hand = torch.stack([-logits[b, t].log_softmax(0)[targets[b, t]] for b in range(2) for t in range(5)]).mean()
    torch.testing.assert_close(cross_entropy(logits, targets), by_hand)
