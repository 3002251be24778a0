"""A job's data, model, optimizer and batches, as every worker makes them; and whether a job has them at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from thinwire.jobs.devices import device
from thinwire.jobs.job import Job
from thinwire.workloads.batches import Batches
from thinwire.workloads.data import data
from thinwire.workloads.dataset import Dataset
from thinwire.workloads.dropout import add_dropout
from thinwire.workloads.models import model
from thinwire.workloads.recipe import Recipe, build_optimizer


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one worker of a job trains, with what, on which examples."""

    recipe: Recipe
    dataset: Dataset
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches


def workload(job: Job, rank: int = 0) -> Workload:
    """Returns a worker's part; the model is on the job's device.

    Args:
        job: what to train.
        rank: the worker's number.

    Raises:
        ConfigError: a model that the data does not suit, fewer examples than a batch for every worker, or an option
            that the optimizer does not take.
        DataError: the data set is missing or damaged.

    Example:
        >>> made = workload(Job(model="mlp", data="digits", workers=4))
        >>> made.dataset, made.batches.batches_per_epoch
        (<Dataset digits: 1,347 train, 450 test, (1, 8, 8)>, 42)
    """
    recipe = job.recipe()
    dataset = data(job.data, root=job.data_root, context=recipe.context)
    made = model(job.model, num_classes=dataset.num_classes, in_shape=dataset.in_shape, seed=job.seed)
    add_dropout(made, recipe.dropout, seed=job.seed, rank=rank)
    made = made.to(device(job.device))
    return Workload(
        recipe=recipe,
        dataset=dataset,
        model=made,
        optimizer=build_optimizer(made, recipe),
        batches=Batches(
            dataset, rank=rank, workers=job.workers, batch=recipe.batch, seed=job.seed, augment=recipe.augment
        ),
    )


def check(jobs: Iterable[Job]) -> None:
    """Says in one sentence what would be a traceback of every worker later. Errors are those of `workload`.

    Args:
        jobs: what is to be trained; nothing comes to a device.
    """
    seen = set()
    for job in jobs:
        alike = replace(job, device="cpu", seed=0)
        key = (job.model, job.data, job.data_root, job.workers, repr(job.recipe()))
        if key not in seen:
            seen.add(key)
            workload(alike)
