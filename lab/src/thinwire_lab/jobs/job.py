"""The settings of one training run, which travel from the command line to every process, and its workload."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from thinwire.errors import ConfigError
from thinwire.policies.compression import codec_by_name
from thinwire.policies.designs import Design, design
from thinwire_lab.jobs.options import JobOptions, RecipeOptions
from thinwire_lab.workloads.dropout import check_dropout
from thinwire_lab.workloads.recipe import Recipe, for_workers
from thinwire_lab.workloads.recipes import recipe
from thinwire_lab.workloads.training import Training, find_device, training


@dataclass(frozen=True, kw_only=True)
class Job(JobOptions):
    """One run of one design."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.seconds is not None:
            raise ConfigError("a run has a number of steps or a time budget, not both")
        if self.servers < 1:
            raise ConfigError(f"{self.servers} servers; at least 1 is needed")
        if self.servers_on_workers and self.servers != 1:
            raise ConfigError(f"{self.servers} servers, and one on every worker's node: give one or the other")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ConfigError(f"{self.seconds} seconds; a time budget is positive and finite")
        if not 0 <= self.eval_every < math.inf:
            raise ConfigError(f"evaluations every {self.eval_every} seconds; 0 means only at the end")
        if self.eval_steps < 0:
            raise ConfigError(f"evaluations every {self.eval_steps} steps; 0 means only at the end")
        find_device(self.device)
        self.full_design()
        recipe = self.recipe()
        check_dropout(self.model, recipe.dropout)
        if self.momentum is not None and recipe.optimizer != "SGD":
            raise ConfigError(f"momentum {self.momentum:g} is of SGD; {self.model} trains with {recipe.optimizer}")

    @property
    def shards(self) -> int:
        """How many server processes there are."""
        return self.workers if self.servers_on_workers else self.servers

    def full_design(self) -> Design:
        """Returns the design with all options."""
        return design(
            self.design,
            up=None if self.codec_up is None else codec_by_name(self.codec_up),
            down=None if self.codec_down is None else codec_by_name(self.codec_down),
            consistency=self.consistency,
            placement=self.placement,
            compression=self.compression,
            transmission=self.transmission,
        )

    def recipe(self) -> Recipe:
        """Returns the recipe with this job's settings."""
        names = ("steps", *(field.name for field in fields(RecipeOptions)))
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        own = {name: value for name, value in given.items() if value is not None}
        return replace(for_workers(recipe(self.model, self.data, design=self.design), self.workers), **own)

    def workload(self, rank: int = 0) -> Training:
        """Returns a worker's data, model, optimizer and batches, with the model on the job's device."""
        return training(
            self.recipe(),
            data=self.data,
            rank=rank,
            workers=self.workers,
            seed=self.seed,
            data_root=self.data_root,
            device=find_device(self.device),
        )


def check_workloads(jobs: Iterable[Job]) -> None:
    """Raises the errors of `Job.workload` before any process starts."""
    different = {
        (job.model, job.data, job.data_root, job.workers, repr(job.recipe())): replace(job, device="cpu", seed=0)
        for job in jobs
    }
    for job in different.values():
        job.workload()
