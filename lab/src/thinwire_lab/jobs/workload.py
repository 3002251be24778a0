"""A job's data, model, optimizer and batches, as every worker makes them; and whether a job has them at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from thinwire_lab.jobs.devices import device
from thinwire_lab.jobs.job import Job
from thinwire_lab.workloads.training import Training, training


def workload(job: Job, rank: int = 0) -> Training:
    """Returns a worker's part; the model is on the job's device."""
    return training(
        job.recipe(),
        data=job.data,
        rank=rank,
        workers=job.workers,
        seed=job.seed,
        data_root=job.data_root,
        device=device(job.device),
    )


def check(jobs: Iterable[Job]) -> None:
    """Says in one sentence what would be a traceback of every worker later. Errors are those of `workload`."""
    seen = set()
    for job in jobs:
        alike = replace(job, device="cpu", seed=0)
        key = (job.model, job.data, job.data_root, job.workers, repr(job.recipe()))
        if key not in seen:
            seen.add(key)
            workload(alike)
