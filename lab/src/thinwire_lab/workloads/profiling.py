"""A plan's profile of a bundled model, trained by its recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from thinwire.planner.models import torch_threads
from thinwire.planner.profile import STEPS, Profile, profile
from thinwire_lab.workloads.recipe import for_workers
from thinwire_lab.workloads.recipes import recipe
from thinwire_lab.workloads.training import training


def profile_workload(
    model: str, data: str, *, batch: int | None = None, seed: int = 0, steps: int = STEPS, threads: int | None = None
) -> Profile:
    network, step = training_step(model, data, batch=batch, seed=seed)
    with torch_threads(threads):
        return profile(network, step, steps=steps)


def training_step(
    model: str, data: str = "digits", *, rank: int = 0, workers: int = 1, batch: int | None = None, seed: int = 0
) -> tuple[nn.Module, Callable[[], None]]:
    """Returns a worker's network, and a function that takes its next step without any exchange."""
    how = for_workers(recipe(model, data), workers)
    made = training(replace(how, batch=batch or how.batch), data=data, rank=rank, workers=workers, seed=seed)

    def step() -> None:
        made.optimizer.zero_grad()
        made.backward()
        made.optimizer.step()

    return made.model, step
