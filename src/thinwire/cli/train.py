"""`thinwire train`: one run on this machine, every process real, every link thin on request."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from thinwire.cli import options
from thinwire.cli.console import console, runs_table, show, write_json
from thinwire.cli.options import takes
from thinwire.engines.events import Event, Lost, Restarted
from thinwire.engines.links import parse_rate
from thinwire.engines.namespaces import can_unshare, reexec_in_user_namespace
from thinwire.errors import ConfigError, EngineError
from thinwire.jobs.checkpoints import RunCheckpoints
from thinwire.jobs.cluster import FIXED, Elastic, choose_links, run
from thinwire.jobs.events import Progress as Stepped
from thinwire.jobs.in_process import run as run_in_process
from thinwire.jobs.job import Job
from thinwire.jobs.outcome import RunOutcome

app = typer.Typer()


def with_privileges(link: str | None, shaping: str) -> None:
    """Starts this command again as root of a user namespace, where that is what kernel shaping lacks."""
    if parse_rate(link or "none").bps is not None and shaping != "application" and can_unshare():
        reexec_in_user_namespace([sys.executable, "-m", "thinwire", *sys.argv[1:]])


def run_with_progress(
    job: Job,
    shaping: str,
    worker_options: Sequence[str] = (),
    checkpoints: RunCheckpoints | None = None,
    *,
    in_process: bool = False,
    elastic: Elastic = FIXED,
    max_restarts: int = 0,
) -> RunOutcome:
    """Runs a job behind a progress bar; `in_process`: with threads for workers, which takes no other option."""
    links = choose_links(job.link, shaping)
    if links.note:
        console.print(f"[yellow]{escape(links.note)}; links are shaped inside the transport (shaping: application)[/]")
    bar = Progress(
        TextColumn("{task.description:>14}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        console=console,
        transient=False,
    )
    total = job.seconds or float(job.recipe().steps)
    with bar:
        task = bar.add_task(escape(job.design), total=total, text="starting")

        def on_event(process: str, event: Event) -> None:
            if isinstance(event, Restarted):
                console.print(f"{process} {event.reason}; started again, {event.left} restarts left")
            elif isinstance(event, Lost):
                console.print(f"{process} {event.reason.partition(chr(10))[0]} … the others go on without it")
            elif isinstance(event, Stepped):
                done = min(event.seconds, total) if job.seconds else event.step
                bar.update(task, completed=done, text=f"step {event.step:,}, loss {event.loss:.3f}")

        if in_process:
            outcome = run_in_process(job, on_event=on_event)
        else:
            outcome = run(
                job,
                links=links,
                on_event=on_event,
                worker_options=worker_options,
                checkpoints=checkpoints,
                elastic=elastic,
                max_restarts=max_restarts,
            )
        bar.update(task, completed=total, text=f"{outcome.steps:,} steps, {outcome.test_accuracy:.2%}")
    return outcome


@app.command(
    epilog="Example: thinwire train --design '3lc[s=1.75]' --model lenet --data fashion-mnist --workers 4 "
    "--link 10mbit --steps 500 --json out.json"
)
@takes(Job)
def train(
    job: Job,
    telemetry: options.Telemetry = None,
    metrics_port: options.MetricsPort = None,
    tensorboard: options.TensorBoard = None,
    shaping: options.Shaping = "auto",
    checkpoint_dir: options.CheckpointDir = None,
    checkpoint_every: options.CheckpointEvery = 100,
    resume: options.Resume = False,
    min_workers: options.MinWorkers = None,
    worker_grace_s: options.WorkerGrace = None,
    straggler_grace_s: options.StragglerGrace = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Start a process that fails again, so often: a worker goes on where the others are; with a server, "
            "which needs --checkpoint-dir, all go back to the newest step that everybody has.",
        ),
    ] = 0,
    json: options.Json = None,
) -> None:
    """Train a model with a server and N workers on this machine, over an emulated link."""
    if resume and checkpoint_dir is None:
        raise ConfigError("--resume goes on from checkpoints: say where they are with --checkpoint-dir DIR")
    checkpoints = None
    if checkpoint_dir is not None:
        checkpoints = RunCheckpoints(folder=checkpoint_dir, every=checkpoint_every, resume=resume)
    with_privileges(job.link, shaping)
    telemetry_options = [
        *(() if telemetry is None else ("--telemetry", str(telemetry))),
        *(() if metrics_port is None else ("--metrics-port", str(metrics_port))),
        *(() if tensorboard is None else ("--tensorboard", str(tensorboard))),
    ]
    elastic = Elastic(min_workers=min_workers, worker_grace_s=worker_grace_s, straggler_grace_s=straggler_grace_s)
    outcome = run_with_progress(
        job, shaping, telemetry_options, checkpoints, elastic=elastic, max_restarts=max_restarts
    )
    show(runs_table([outcome], f"{job.model} on {job.data}, {job.workers} workers"))
    write_json(json, outcome)
    if outcome.lost_workers:
        raise EngineError(f"{outcome.lost_workers} of {job.workers} workers did not reach the end")
