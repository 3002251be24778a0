"""The losses that training minimises, and the score of a model on the test set.

A recipe minimises cross-entropy, or half the squared error against ±1, with an ℓ1 penalty. Scores always use
cross-entropy, so that runs compare.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from thinwire_lab.workloads.dataset import Dataset
from thinwire_lab.workloads.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Score:
    """The outcome of `evaluate`."""

    accuracy: float  # share of right answers, 0…1; for text of right next bytes
    loss: float  # mean cross-entropy in nats


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats over all targets of a batch, the loss that training minimises."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Dataset, batch: int = 512) -> Score:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    was_training = model.training
    model.eval()
    right = 0
    loss = 0.0
    try:
        for start in range(0, len(dataset.test_x), batch):
            x, y = dataset.test_x[start : start + batch], dataset.test_y[start : start + batch]
            logits = model(dataset.inputs(x.to(device)))
            targets = y.long().to(device)
            right += int((logits.argmax(-1) == targets).sum())
            loss += float(cross_entropy(logits, targets)) * targets.numel()
    finally:
        model.train(was_training)
    return Score(accuracy=right / dataset.test_y.numel(), loss=loss / dataset.test_y.numel())


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Half the sum over the outputs of (tanh(output) − target)², mean over the batch (Øland & Raj, section 2).

    The target is 1 for the right class and −1 for all others.

    >>> squared_error(torch.zeros(4, 3), torch.tensor([0, 1, 2, 1])).item()
    1.5
    """
    wanted = 2.0 * nn.functional.one_hot(targets, outputs.shape[-1]).to(outputs.dtype) - 1
    return (outputs.tanh() - wanted).square().sum(-1).mean() / 2


def training_loss(model: nn.Module, recipe: Recipe, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = squared_error(outputs, targets) if recipe.loss == "squared-error" else cross_entropy(outputs, targets)
    if recipe.l1:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                loss = loss + recipe.l1 * parameter.abs().sum()
    return loss
