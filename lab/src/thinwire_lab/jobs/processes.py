"""One training run with a server and workers as processes of this machine, or as actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from thinwire.cautions import caution
from thinwire.engines.events import Event
from thinwire.engines.ray_cluster import RayCluster
from thinwire.engines.roles import OnEvent, Roles
from thinwire.errors import ConfigError, EngineError
from thinwire_lab.jobs.checkpoints import RunCheckpoints
from thinwire_lab.jobs.cluster import SERVER, Links, OnStart, Place, choose_links, run_cluster
from thinwire_lab.jobs.events import KINDS, Accuracy, Done
from thinwire_lab.jobs.job import Job, check_workloads
from thinwire_lab.jobs.outcome import CurvePoint, RunOutcome, WorkerOutcome, summarise

_NOT_THE_WORKERS = ("link", "servers", "servers_on_workers")


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """The servers' options for workers that die."""

    min_workers: int | None = None
    worker_grace_s: float | None = None

    def check(self, workers: int) -> None:
        """Raises ConfigError where the minimum exceeds the number of workers."""
        if self.min_workers is not None and self.min_workers > workers:
            raise ConfigError(f"--min-workers {self.min_workers} of {workers} workers; give at most {workers}")

    def arguments(self) -> list[str]:
        """Returns the options of a server's command."""
        given = ((each.name, getattr(self, each.name)) for each in fields(self))
        named = (("--" + name.replace("_", "-"), value) for name, value in given if value is not None)
        return [text for name, value in named for text in (name, str(value))]


FIXED = Elastic()
"""All workers train from the first step to the last."""


def run(
    job: Job,
    *,
    place: Place | None = None,
    on_event: OnEvent = lambda process, event: None,
    worker_options: Sequence[str] = (),
    checkpoints: RunCheckpoints | None = None,
    elastic: Elastic = FIXED,
    max_restarts: int = 0,
    on_start: OnStart | None = None,
) -> RunOutcome:
    """Trains once."""
    elastic.check(job.workers)
    check_workloads([job])
    place = place or Place(links=choose_links(job.link))
    step: int | None = None
    if checkpoints is not None:
        checkpoints.check(job)
        step = checkpoints.newest(job, elastic.min_workers) if checkpoints.resume else None
        for rank in checkpoints.forget_lacking(job, step):
            caution(f"worker {rank} has no checkpoint of exchange {step}: it begins with the shards' parameters")
    curve: list[CurvePoint] = []
    workers: list[WorkerOutcome] = []

    def collect(process: str, event: Event) -> None:
        match event:
            case Accuracy():
                # Workers that went back to a checkpoint evaluate steps again.
                curve[:] = [*(point for point in curve if point.step < event.step), event.point()]
            case Done(outcome=outcome):
                workers.append(outcome)
        on_event(process, event)

    def server(index: int, again: bool) -> list[str]:
        kept = [] if checkpoints is None else checkpoints.arguments(checkpoints.server(index), step, again=again)
        return ["server", *elastic.arguments(), *kept]

    def worker(rank: int, addresses: list[str], again: bool) -> list[str]:
        more = [] if checkpoints is None else checkpoints.arguments(checkpoints.worker(rank), step, again=again)
        return [*worker_arguments(job, rank, addresses), *worker_options, *more]

    roles = Roles(
        workers=job.workers,
        worker=worker,
        servers=job.shards,
        server=server,
        servers_on_workers=job.servers_on_workers,
        servers_return=checkpoints is not None,
        min_workers=elastic.min_workers,
        max_restarts=max_restarts,
    )
    try:
        interfaces = run_cluster(roles, place, KINDS, collect, on_start=on_start)
    except EngineError as error:
        if max_restarts and checkpoints is None and str(error).startswith(SERVER):
            raise EngineError(
                f"{error}\nA server can be started again if all processes write checkpoints: give --checkpoint-dir"
            ) from None
        raise
    outcome = summarise(job, workers, curve, rate=place.links.rate, shaping=place.links.shaping)
    return msgspec.structs.replace(outcome, **interfaces)


def run_on_ray(
    job: Job,
    *,
    cluster: RayCluster,
    links: Links | None = None,
    checkpoints: RunCheckpoints | None = None,
    **options: Any,
) -> RunOutcome:
    """Trains once with actors of a Ray cluster as servers and workers; `options` are those of `run`."""
    cluster.check()
    links = links or choose_links(job.link, "application")
    if links.shaping == "kernel":
        raise ConfigError("the kernel shapes links of this machine alone; with Ray use --shaping application")
    if checkpoints is not None:  # actors have other working folders
        checkpoints = replace(checkpoints, folder=checkpoints.folder.resolve())
    if job.data_root is not None:
        job = replace(job, data_root=str(Path(job.data_root).resolve()))
    engine = partial(cluster.engine, roles=2 if job.servers_on_workers else 1, gpus=job.device.startswith("cuda"))
    place = Place(links=links, open_engine=engine, private=cluster.private)
    return run(job, place=place, checkpoints=checkpoints, **options)


def worker_arguments(job: Job, rank: int, addresses: Sequence[str]) -> list[str]:
    """Returns the command line of one worker.

    Example:
        >>> worker_arguments(Job(design="fp32", steps=9), 2, ["10.0.0.1:7070"])[:9]
        ['worker', '--rank', '2', '--server', 'grpc://10.0.0.1:7070', '--data', 'digits', '--workers', '4']
    """
    arguments = ["worker", "--rank", str(rank)]
    for address in addresses:
        arguments += ["--server", f"grpc://{address}"]
    for name, value in asdict(job).items():
        if value is not None and name not in _NOT_THE_WORKERS:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments
