"""One run of one design, with processes: start a server and workers, collect what they report, sum it up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import msgspec

from thinwire.engines.events import Event
from thinwire.jobs.checkpoints import RunCheckpoints
from thinwire.jobs.cluster import OnEvent, choose_links, run_cluster
from thinwire.jobs.events import KINDS, Accuracy, Done
from thinwire.jobs.job import Job
from thinwire.jobs.outcome import CurvePoint, RunOutcome, WorkerOutcome, summarise

_NOT_THE_WORKERS = ("link", "servers", "servers_on_workers")


def run(
    job: Job,
    *,
    shaping: str = "auto",
    on_event: OnEvent = lambda process, event: None,
    worker_options: Sequence[str] = (),
    checkpoints: RunCheckpoints | None = None,
) -> RunOutcome:
    """Trains once.

    Args:
        job: what to train.
        shaping: see `choose_links`.
        on_event: called with each process's name and event, as it is reported.
        worker_options: further options of every worker's command: where its telemetry goes.
        checkpoints: where and how often every process writes a checkpoint, and whether to go on from there.

    Raises:
        ConfigError: there is nothing to resume, or a job that cannot be resumed.
        EngineError: a process failed; the message holds its last output. Nothing is left running.
    """
    links = choose_links(job.link, shaping)
    step: int | None = None
    if checkpoints is not None:
        checkpoints.check(job)
        step = checkpoints.newest(job) if checkpoints.resume else None
    curve: list[CurvePoint] = []
    workers: list[WorkerOutcome] = []

    def collect(process: str, event: Event) -> None:
        match event:
            case Accuracy():
                curve.append(event.point())
            case Done(outcome=outcome):
                workers.append(outcome)
        on_event(process, event)

    def server_command(index: int) -> list[str]:
        return ["server", *([] if checkpoints is None else checkpoints.arguments(checkpoints.server(index), step))]

    def worker_command(rank: int, addresses: list[str]) -> list[str]:
        more = [] if checkpoints is None else checkpoints.arguments(checkpoints.worker(rank), step)
        return [*worker_arguments(job, rank, addresses), *worker_options, *more]

    interfaces = run_cluster(
        links,
        job.workers,
        worker_command,
        KINDS,
        collect,
        servers=job.shards,
        servers_on_workers=job.servers_on_workers,
        server_command=server_command,
    )
    outcome = summarise(job, workers, curve, rate=links.rate, shaping=links.shaping)
    return msgspec.structs.replace(outcome, **interfaces)


def worker_arguments(job: Job, rank: int, addresses: Sequence[str]) -> list[str]:
    """Returns the command line of one worker, the same that a person would type.

    Example:
        >>> worker_arguments(Job(design="fp32", steps=9), 2, ["10.0.0.1:7070"])[:9]
        ['worker', '--rank', '2', '--server', 'grpc://10.0.0.1:7070', '--design', 'fp32', '--model', 'mlp']
    """
    arguments = ["worker", "--rank", str(rank)]
    for address in addresses:
        arguments += ["--server", f"grpc://{address}"]
    for name, value in asdict(job).items():
        if value is not None and name not in _NOT_THE_WORKERS:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments
