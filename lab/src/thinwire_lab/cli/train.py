"""`thinwire train`: one run with real processes and thin links on this machine, or on a Ray cluster."""

from __future__ import annotations

import math
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.console import errors, show, write_json
from thinwire.cli.lazy import lazily
from thinwire.cli.outputs import check_apart
from thinwire.errors import ConfigError, EngineError
from thinwire.quantities import counted
from thinwire_lab.cli import options
from thinwire_lab.cli.folders import writable_folder
from thinwire_lab.cli.options import takes
from thinwire_lab.engines.system_tools import with_privileges
from thinwire_lab.jobs.options import JobOptions

with lazily():
    from thinwire.engines import ray_cluster
    from thinwire.runtime import metrics
    from thinwire_lab.cli import running
    from thinwire_lab.jobs import checkpoints, cluster, processes
    from thinwire_lab.jobs import job as jobs

app = typer.Typer()


class Engine(StrEnum):
    """The starter of the processes."""

    LOCAL = "local"
    RAY = "ray"


@app.command(
    epilog="Example: thinwire train --design '3lc[s=1.75]' --model lenet --data fashion-mnist --workers 4 "
    "--link 10mbit --steps 500 --json out.json"
)
@takes(JobOptions)
def train(
    given: JobOptions,
    telemetry: options.Telemetry = None,
    metrics_port: options.MetricsPort = None,
    tensorboard: options.TensorBoard = None,
    shaping: options.Shaping = "auto",
    checkpoint_dir: options.CheckpointDir = None,
    checkpoint_every: options.CheckpointEvery = options.CHECKPOINT_EVERY,
    resume: options.ResumeAll = False,
    min_workers: options.MinWorkers = None,
    worker_grace_s: options.WorkerGrace = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="How often to restart a failed process. A worker continues at the step of the others; a server needs "
            "--checkpoint-dir, and all processes return to the newest common step.",
        ),
    ] = 0,
    engine: Annotated[
        Engine,
        typer.Option(help="Who starts the processes: local, this machine alone; ray, actors of a Ray cluster."),
    ] = Engine.LOCAL,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_ADDRESS", help="Of the Ray cluster: auto, or host:port; by default a Ray of this machine alone."
        ),
    ] = None,
    certs: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="With Ray: a folder of `thinwire certs` that all nodes see."),
    ] = None,
    insecure: options.Insecure = False,
    json: options.Json = None,
) -> None:
    """Train a model with a server and N workers on this machine, over an emulated link; or on a Ray cluster."""
    check_apart(json, [telemetry], "the step records are written")
    if resume and checkpoint_dir is None:
        raise ConfigError("--resume needs the checkpoints' folder: add --checkpoint-dir DIR")
    if checkpoint_every != options.CHECKPOINT_EVERY and checkpoint_dir is None:
        raise ConfigError("--checkpoint-every needs a folder: add --checkpoint-dir DIR")
    job, written = jobs.Job(**vars(given)), None
    if checkpoint_dir is not None:
        written = checkpoints.RunCheckpoints(folder=checkpoint_dir, every=checkpoint_every, resume=resume)
    ray = None
    if engine is Engine.RAY:
        ray = ray_cluster.RayCluster(address=address, certs=certs, insecure=insecure)
        ray.check()
        # Actors have other working folders.
        telemetry, tensorboard = (None if each is None else each.resolve() for each in (telemetry, tensorboard))
    elif certs is not None or insecure:
        raise ConfigError("--certs and --insecure are for --engine ray: local processes listen on loopback")
    elif address not in (None, os.environ.get("RAY_ADDRESS")):
        raise ConfigError(f"--address {address} is of a Ray cluster: add --engine ray")
    else:
        with_privileges(job.link, shaping)
        if metrics_port is not None and cluster.choose_links(job.link, shaping).shaping == "kernel":
            raise ConfigError(
                f"--metrics-port {metrics_port}: behind a link that the kernel shapes worker 0 is in a separate "
                "network; add --shaping application, or use --telemetry FILE instead"
            )
        if telemetry is not None:
            metrics.JsonLines(telemetry).close()  # raises ConfigError before any process starts
        if tensorboard is not None:
            writable_folder(tensorboard)
    telemetry_options = [
        *(() if telemetry is None else ("--telemetry", str(telemetry))),
        *(() if metrics_port is None else ("--metrics-port", str(metrics_port))),
        *(() if tensorboard is None else ("--tensorboard", str(tensorboard))),
    ]
    elastic = processes.Elastic(min_workers=min_workers, worker_grace_s=worker_grace_s)
    outcome = running.run_with_progress(
        job,
        shaping,
        ray=ray,
        worker_options=telemetry_options,
        checkpoints=written,
        elastic=elastic,
        max_restarts=max_restarts,
    )
    write_json(json, outcome)  # first, for standard output may be closed
    show(running.runs_table([outcome], f"{job.model} on {job.data}, {counted(job.workers, 'worker')}"))
    if not math.isfinite(outcome.train_loss):
        errors.print("[yellow]warning:[/] the training has diverged: its last losses hold NaN or Inf")
    if outcome.lost_workers:
        raise EngineError(f"{outcome.lost_workers} of {job.workers} workers did not reach the end")
