"""How good a model is: the loss it is trained with, and its score on the test set.

Strategy: plain cross-entropy for labels and for next bytes alike; accuracy and mean loss over the whole
test set in one pass without gradients. The model is left in the mode it was in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from thinwire_lab.workloads.dataset import Dataset


@dataclass(frozen=True, kw_only=True)
class Score:
    """The outcome of `evaluate`."""

    accuracy: float  # share of right answers, 0…1; for text of right next bytes
    loss: float  # mean cross-entropy in nats


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats over all targets of a batch, the loss that training minimises.

    >>> cross_entropy(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0])).item()
    0.6931471824645996
    """
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Dataset, batch: int = 512) -> Score:
    """Scores a model on a data set's whole test set."""
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
