"""`thinwire worker`: one worker that trains a bundled model, on any machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import UnsetType

from thinwire.cautions import caution
from thinwire.cli.console import Told, report, write_json
from thinwire.cli.lazy import lazily
from thinwire.cli.outputs import STANDARD_OUTPUT, check_apart
from thinwire.cli.resuming import checkpoint_names, resuming
from thinwire.cli.server import grpc_options
from thinwire.errors import ConfigError, SessionLostError
from thinwire.security import Credentials
from thinwire_lab.cli import options
from thinwire_lab.cli.options import takes
from thinwire_lab.jobs.options import JobOptions

if TYPE_CHECKING:
    from thinwire.engines.events import Event
    from thinwire_lab.jobs.outcome import WorkerOutcome
with lazily():
    from thinwire.runtime import claim, connection, metrics
    from thinwire_lab.jobs import checkpoints, training
    from thinwire_lab.jobs import events as told
    from thinwire_lab.jobs import job as jobs

app = typer.Typer()


@app.command(
    epilog="Example, on each of four machines, with rank 0 … 3: "
    "thinwire worker --server grpc://10.0.0.1:7070 --rank 0 --workers 4 --design '3lc[s=1.75]' "
    "--tls-cert certs/worker-0.pem --tls-key certs/worker-0.key --tls-ca certs/ca.pem --token-file certs/worker-0.token"
)
@takes(JobOptions, without=("link", "servers", "servers_on_workers"))
def worker(
    given: JobOptions,
    server: Annotated[list[str], typer.Option(help="A server's address, grpc://host:port; repeat for several shards.")],
    rank: Annotated[int, typer.Option(min=0, help="This worker's number, 0 … workers − 1.")] = 0,
    telemetry: options.Telemetry = None,
    metrics_port: options.MetricsPort = None,
    tensorboard: options.TensorBoard = None,
    connect_timeout: Annotated[float, typer.Option(min=0, max=1e6, help="Seconds to wait for the server.")] = 60.0,
    reconnect_s: Annotated[
        float, typer.Option(min=0, max=1e6, help="Seconds to try again when a connection breaks.")
    ] = 60.0,
    checkpoint: options.Checkpoint = None,
    checkpoint_every: options.CheckpointEvery = options.CHECKPOINT_EVERY,
    resume: options.Resume = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_ca: options.TlsCa = None,
    token_file: options.TokenFile = None,
    insecure: options.Insecure = False,
    shape: options.Shape = None,
    events: options.Events = False,
    json: options.Json = None,
) -> None:
    """Train as one worker. All workers take the same options but `--rank`."""
    start = resuming(checkpoint, checkpoint_every, resume)
    for file in (telemetry, json):
        check_apart(file, checkpoint_names(checkpoint), "the checkpoint is written")
    check_apart(json, [telemetry], "the step records are written")
    for each in server:  # before data are read and the model is made
        connection.server_address(each)
    if events and json == STANDARD_OUTPUT:
        raise ConfigError("--events and --json - write to standard output: give --json a file")
    job, mine = jobs.Job(**vars(given)), None
    if checkpoint is not None:
        mine = checkpoints.WorkerCheckpoint(
            path=checkpoint, every=checkpoint_every, resume=start.resumes, step=start.step
        )
    credentials = Credentials(ca=tls_ca, cert=tls_cert, key=tls_key, token_file=token_file, insecure=insecure)
    transport = credentials.worker(rank, grpc_options(shape))
    tell = Told()

    def train(kept: checkpoints.WorkerCheckpoint | None) -> WorkerOutcome:
        return training.run_worker(
            replace(job, servers=len(server)),
            rank=rank,
            servers=lambda: connection.connect_all(
                server, connect_timeout_s=connect_timeout, reconnect_s=reconnect_s, options=transport
            ),
            metrics=open_metrics(rank, telemetry, metrics_port, tensorboard),
            report=report if events else partial(_tell, tell),
            connect_timeout_s=connect_timeout,
            checkpoint=kept,
        )

    with nullcontext() if checkpoint is None else claim.claimed(checkpoint, resumes=start.resumes):
        outcome = rejoining(train, mine)
    write_json(json, outcome)


def rejoining(
    train: Callable[[checkpoints.WorkerCheckpoint | None], WorkerOutcome],
    kept: checkpoints.WorkerCheckpoint | None,
) -> WorkerOutcome:
    """Trains, and joins again when a shard no longer knows this worker.

    All workers and shards then return to the newest common checkpoint, and the run ends with the bits of an undisturbed
    one. A worker without that checkpoint takes the shards' parameters and the residuals of its newest checkpoint.
    """
    while True:
        try:
            return train(kept)
        except SessionLostError as error:
            # All agree on the step to return to; the command line's step was that of the first start.
            if kept is not None:
                kept = replace(kept, step=None, resume=kept.resume and bool(kept.own()))
            caution(f"{error}. This worker joins again")


def open_metrics(
    rank: int, telemetry: Path | None, metrics_port: int | None, tensorboard: Path | None
) -> list[metrics.MetricsWriter]:
    """Opens the chosen metrics writers: JSON lines on all workers, the others on worker 0 alone."""
    writers: list[metrics.MetricsWriter] = []
    if telemetry is not None:
        writers.append(metrics.JsonLines(telemetry))
    if metrics_port is not None and rank == 0:
        writers.append(metrics.Prometheus(metrics_port))
    if tensorboard is not None and rank == 0:
        writers.append(metrics.TensorBoard(tensorboard))
    return writers


def _tell(tell: Callable[[str], None], event: Event) -> None:
    match event:
        case told.Progress():
            tell(f"step {event.step:,}  {event.seconds:.1f} s  loss {event.loss:.4f}")
        case told.Accuracy():
            tell(f"step {event.step:,}  test accuracy {event.accuracy:.2%}")
        case told.Done(outcome=outcome):
            late = isinstance(outcome.train_loss, UnsetType)
            loss = "no loss" if late else f"loss {outcome.train_loss:.4f}"
            tell(f"{outcome.steps:,} steps in {outcome.seconds:.1f} s, {loss}")
