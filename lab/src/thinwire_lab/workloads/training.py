"""One worker's model, optimizer and batches by a recipe, for runs, plans, benchmarks and studies."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass

import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire_lab.workloads.batches import Batches
from thinwire_lab.workloads.data import data as find_data
from thinwire_lab.workloads.dataset import Dataset
from thinwire_lab.workloads.dropout import add_dropout
from thinwire_lab.workloads.evaluate import training_loss
from thinwire_lab.workloads.models import model
from thinwire_lab.workloads.recipe import Recipe, build_optimizer, clip_gradients

Examples = tuple[torch.Tensor, torch.Tensor]  # inputs and targets of a batch
CPU = torch.device("cpu")
_DEVICE = re.compile(r"cpu|cuda(?::(?P<index>\d+))?")


def find_device(name: str) -> torch.device:
    """Returns the device; raises ConfigError if this machine lacks it."""
    match = _DEVICE.fullmatch(name)
    if match is None:
        raise ConfigError(f"device {name!r}; allowed are cpu, cuda, and one of several as in cuda:1")
    if name != "cpu":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(match["index"] or 0) >= count:
            raise ConfigError(f"device {name!r}: torch {torch.__version__} sees {count} CUDA devices here; use cpu")
    return torch.device(name)


@dataclass(frozen=True, kw_only=True)
class Training:
    """One worker's part of a training."""

    recipe: Recipe
    dataset: Dataset
    model: nn.Module  # on `device`
    optimizer: torch.optim.Optimizer  # at the initial learning rate
    batches: Batches  # this worker's
    device: torch.device = CPU  # the model's

    def backward(
        self, examples: Examples | None = None, *, through: nn.Module | None = None, clips: bool = True
    ) -> torch.Tensor:
        """Adds the gradients of one batch, by default the next, to the parameters', and returns its detached loss.

        `through` replaces the model in the forward pass, such as torch's DDP around it. `clips` allows clipping; not
        if gradients are sent before the end of the backward pass.
        """
        inputs, targets = (each.to(self.device) for each in examples or next(self.batches))
        outputs = (through or self.model)(inputs)
        loss = training_loss(self.model, self.recipe, outputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if clips:
            clip_gradients(self.model, self.recipe)
        return loss.detach()

    def wait(self) -> None:
        """Waits until the device has completed its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def copy(self) -> Training:
        """Returns a copy with the same examples and a new model, optimizer and batches."""
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
