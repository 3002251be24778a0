"""A plan's profile of a model that comes with thinwire, trained as its recipe says."""

from __future__ import annotations

from torch import nn

from thinwire.planner.profile import STEPS, Profile, profile
from thinwire.workloads.batches import Batches
from thinwire.workloads.data import data as find_data
from thinwire.workloads.losses import training_loss
from thinwire.workloads.models import model as build_model
from thinwire.workloads.recipes import build_optimizer, recipe


def profile_workload(model: str, data: str, *, batch: int | None = None, seed: int = 0, steps: int = STEPS) -> Profile:
    """Measures some steps of a worker.

    Args:
        model: its name.
        data: name of the data set.
        batch: examples per step; None: the recipe's.
        seed: of weights and batches.
        steps: that are measured.

    Raises:
        ConfigError: unknown names.
        DataError: the data set is not here.
    """
    dataset, how = find_data(data), recipe(model, data)
    network = build_model(model, num_classes=dataset.num_classes, in_shape=dataset.in_shape, seed=seed)
    optimizer = build_optimizer(network, how)
    batches = Batches(dataset, rank=0, workers=1, batch=batch or how.batch, seed=seed, augment=how.augment)

    def step(network: nn.Module = network) -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        training_loss(network, how, network(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return profile(network, step, steps=steps)
