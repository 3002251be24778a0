"""A run of a `Job` whose servers and workers are actors of a Ray cluster, as `thinwire train --engine ray` has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from thinwire.engines.ray_cluster import RayCluster
from thinwire.engines.roles import OnEvent
from thinwire.errors import ConfigError
from thinwire_lab.jobs.checkpoints import RunCheckpoints
from thinwire_lab.jobs.cluster import Links, Place, choose_links
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.jobs.processes import FIXED, Elastic, run


def run_on_ray(
    job: Job,
    *,
    cluster: RayCluster,
    links: Links | None = None,
    on_event: OnEvent = lambda process, event: None,
    worker_options: Sequence[str] = (),
    checkpoints: RunCheckpoints | None = None,
    elastic: Elastic = FIXED,
    max_restarts: int = 0,
) -> RunOutcome:
    """Trains once on a Ray cluster. Other arguments and errors are as `jobs.processes.run` has them."""
    cluster.check()
    links = links or choose_links(job.link, "application")
    if links.shaping == "kernel":
        raise ConfigError("the kernel's links are this machine's alone; with Ray take --shaping application")
    if checkpoints is not None:  # actors have folders of their own
        checkpoints = replace(checkpoints, folder=checkpoints.folder.resolve())
    if job.data_root is not None:
        job = replace(job, data_root=str(Path(job.data_root).resolve()))
    engine = partial(cluster.engine, roles=2 if job.servers_on_workers else 1, gpus=job.device.startswith("cuda"))
    return run(
        job,
        place=Place(links=links, open_engine=engine, private=cluster.private),
        on_event=on_event,
        worker_options=worker_options,
        checkpoints=checkpoints,
        elastic=elastic,
        max_restarts=max_restarts,
    )
