"""A recipe made into one worker's model, optimizer and batches.

A plan, a benchmark and a study train what `thinwire train` does. Schedules and steps belong to the loops.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from thinwire_lab.workloads.batches import Batches
from thinwire_lab.workloads.data import data as find_data
from thinwire_lab.workloads.dataset import Dataset
from thinwire_lab.workloads.dropout import add_dropout
from thinwire_lab.workloads.evaluate import training_loss
from thinwire_lab.workloads.models import model
from thinwire_lab.workloads.recipe import Recipe, build_optimizer, clip_gradients

Examples = tuple[torch.Tensor, torch.Tensor]  # inputs and targets of a batch
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Training:
    """One worker's part of a training."""

    recipe: Recipe  # by which it trains
    dataset: Dataset  # whose examples it trains on
    model: nn.Module  # on `device`
    optimizer: torch.optim.Optimizer  # of the model's parameters, at the rate that the run begins with
    batches: Batches  # this worker's
    device: torch.device = CPU  # where the model is

    def backward(
        self, examples: Examples | None = None, *, through: nn.Module | None = None, clips: bool = True
    ) -> torch.Tensor:
        """Adds the gradients of one batch, by default of the next, to the parameters', and returns its detached loss.

        `through` wraps the model and is called in its place, such as torch's DDP. Without `clips` nothing is clipped,
        for gradients that have left by then.
        """
        inputs, targets = (each.to(self.device) for each in examples or next(self.batches))
        outputs = (through or self.model)(inputs)
        loss = training_loss(self.model, self.recipe, outputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if clips:
            clip_gradients(self.model, self.recipe)
        return loss.detach()

    def copy(self) -> Training:
        """Returns the same training with a model, an optimizer and batches of its own; examples are not copied."""
        return copy.deepcopy(self, {id(self.dataset): self.dataset})


def training(
    recipe: Recipe,
    *,
    data: str,
    rank: int = 0,
    workers: int = 1,
    seed: int = 0,
    data_root: str | None = None,
    device: torch.device = CPU,
) -> Training:
    dataset = find_data(data, root=data_root, context=recipe.context)
    network = model(recipe.model, num_classes=dataset.num_classes, in_shape=dataset.in_shape, seed=seed)
    add_dropout(network, recipe.dropout, seed=seed, rank=rank)
    network = network.to(device)
    return Training(
        recipe=recipe,
        dataset=dataset,
        model=network,
        optimizer=build_optimizer(network, recipe),
        batches=Batches(
            dataset,
            rank=rank,
            workers=workers,
            batch=recipe.batch,
            seed=seed,
            augment=recipe.augment,
            segments=recipe.segments,
        ),
        device=device,
    )
