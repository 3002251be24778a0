"""How good a model is: the loss it is trained with, and its score on the test set.

Strategy: plain cross-entropy for labels and for next bytes alike; accuracy and mean loss over the whole
test set in one pass without gradients. For text the loss is also given in bits per byte. It refuses to know
how the model was trained, and leaves the model in the mode it found it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from thinwire_lab.workloads.dataset import Dataset


@dataclass(frozen=True, kw_only=True)
class Score:
    """The outcome of `evaluate`.

    Attributes:
        accuracy: share of right answers, 0…1; for text of right next bytes.
        loss: mean cross-entropy in nats.
        bits_per_byte: the loss in bits, for text; None otherwise.
    """

    accuracy: float
    loss: float
    bits_per_byte: float | None = None


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats over all targets of a batch, the loss that training minimises.

    Args:
        logits: (batch, classes), or (batch, time, classes) for text.
        targets: int64, (batch,) or (batch, time).

    >>> cross_entropy(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0])).item()
    0.6931471824645996
    """
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Dataset, batch: int = 512) -> Score:
    """Scores a model on a data set's whole test set.

    Args:
        model: from inputs to logits; runs in evaluation mode on the device of its parameters.
        dataset: whose test set is used.
        batch: examples per forward pass; does not change the result beyond rounding.
    """
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
    loss /= dataset.test_y.numel()
    bits = loss / math.log(2) if dataset.task == "bytes" else None
    return Score(accuracy=right / dataset.test_y.numel(), loss=loss, bits_per_byte=bits)
