"""A plan's profile of a model that comes with thinwire, trained as its recipe says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from thinwire.planner.profile import STEPS, Profile, profile
from thinwire.workloads.batches import Batches
from thinwire.workloads.data import data as find_data
from thinwire.workloads.losses import training_loss
from thinwire.workloads.models import model as build_model
from thinwire.workloads.recipe import build_optimizer, clip_gradients
from thinwire.workloads.recipes import recipe


def profile_workload(
    model: str, data: str, *, batch: int | None = None, seed: int = 0, steps: int = STEPS, threads: int | None = None
) -> Profile:
    """Measures some steps of a worker.

    Args:
        model: its name.
        data: name of the data set.
        batch: examples per step; None: the recipe's.
        seed: of weights and batches.
        steps: that are measured.
        threads: of torch's arithmetic; None: as many as it takes by itself.

    Raises:
        ConfigError: unknown names.
        DataError: the data set is not here.
    """
    network, step = training_step(model, data, batch=batch, seed=seed)
    with torch_threads(threads):
        return profile(network, step, steps=steps)


def training_step(
    model: str, data: str, *, rank: int = 0, workers: int = 1, batch: int | None = None, seed: int = 0
) -> tuple[nn.Module, Callable[[], None]]:
    """Returns a worker's network, and what makes its next step without any exchange.

    Args:
        model: its name.
        data: name of the data set.
        rank: of the worker.
        workers: how many share the data.
        batch: examples per step; None: the recipe's.
        seed: of weights and batches.

    Raises:
        ConfigError: unknown names.
        DataError: the data set is not here.
    """
    how = recipe(model, data)
    dataset = find_data(data, context=how.context)
    network = build_model(model, num_classes=dataset.num_classes, in_shape=dataset.in_shape, seed=seed)
    optimizer = build_optimizer(network, how)
    batches = Batches(dataset, rank=rank, workers=workers, batch=batch or how.batch, seed=seed, augment=how.augment)

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        training_loss(network, how, network(inputs), targets).backward()  # type: ignore[no-untyped-call]
        clip_gradients(network, how)
        optimizer.step()

    return network, step


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Within it, torch's arithmetic has so many threads; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
