"""What training minimises: cross-entropy, or half the squared error against ±1, and an ℓ1 penalty beside it.

Recipes say which. Scores are always given in cross-entropy (`evaluate`), so that runs can be compared.
"""

from __future__ import annotations

import torch
from torch import nn

from thinwire_lab.workloads.evaluate import cross_entropy
from thinwire_lab.workloads.recipe import Recipe


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Half the sum over the outputs of (tanh(output) − target)², mean over the batch (Øland & Raj, section 2).

    The target is 1 for the right class and −1 for all others.

    >>> squared_error(torch.zeros(4, 3), torch.tensor([0, 1, 2, 1])).item()
    1.5
    """
    wanted = 2.0 * nn.functional.one_hot(targets, outputs.shape[-1]).to(outputs.dtype) - 1
    return (outputs.tanh() - wanted).square().sum(-1).mean() / 2


def training_loss(model: nn.Module, recipe: Recipe, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the loss of one batch by a recipe, its ℓ1 penalty included."""
    loss = squared_error(outputs, targets) if recipe.loss == "squared-error" else cross_entropy(outputs, targets)
    if recipe.l1:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                loss = loss + recipe.l1 * parameter.abs().sum()
    return loss
