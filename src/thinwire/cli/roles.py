"""`thinwire server` and `thinwire worker`: one role, by hand, on any machine."""

from __future__ import annotations

import importlib
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import UnsetType

from thinwire.cautions import caution
from thinwire.cli import options
from thinwire.cli.console import Interrupted, Told, report, write_json
from thinwire.cli.lazy import lazy
from thinwire.cli.options import takes
from thinwire.cli.outputs import STANDARD_OUTPUT, check_apart
from thinwire.cli.serving_progress import ServingProgress
from thinwire.engines.links import parse_rate
from thinwire.errors import ConfigError, ProtocolError, SessionLostError, StepMismatchError
from thinwire.jobs.options import JobOptions
from thinwire.security import Credentials
from thinwire.transports.grpc import GrpcOptions
from thinwire.transports.shaped import Shaping

if TYPE_CHECKING:
    from thinwire.engines.events import Event
    from thinwire.jobs import checkpoints, training
    from thinwire.jobs import events as told
    from thinwire.jobs import job as jobs
    from thinwire.jobs.outcome import WorkerOutcome
    from thinwire.runtime import checkpoint as checkpoint_files
    from thinwire.runtime import claim, connection, metrics, serving, shard_checkpoints
    from thinwire.runtime import journal as journals
    from thinwire.server import core as cores
    from thinwire.transports.grpc import server as grpc_server
else:
    checkpoints, told = lazy("thinwire.jobs.checkpoints"), lazy("thinwire.jobs.events")
    jobs, training = lazy("thinwire.jobs.job"), lazy("thinwire.jobs.training")
    shard_checkpoints, connection = lazy("thinwire.runtime.shard_checkpoints"), lazy("thinwire.runtime.connection")
    journals, metrics = lazy("thinwire.runtime.journal"), lazy("thinwire.runtime.metrics")
    claim, checkpoint_files = lazy("thinwire.runtime.claim"), lazy("thinwire.runtime.checkpoint")
    serving, cores = lazy("thinwire.runtime.serving"), lazy("thinwire.server.core")
    grpc_server = lazy("thinwire.transports.grpc.server")

app = typer.Typer()

ENDING_GRACE_S, ELASTIC_GRACE_S = 60.0, 10.0
"""How long a server waits for a worker whose connection broke, where the training then ends, or goes on without it."""


def grpc_options(
    shape: str | None, *, keepalive_s: float | None = None, insecure: bool = False, health: str | None = None
) -> GrpcOptions:
    """The transport's options of a role.

    Args:
        shape: the rate of an application-level link; None: no link.
        keepalive_s: quiet seconds before the other end is asked for a sign of life; None takes the transport's own.
        insecure, health: see `GrpcOptions`.
    """
    bps = parse_rate(shape or "none").bps
    options = GrpcOptions(shaping=None if bps is None else Shaping.symmetric(bps), insecure=insecure, health=health)
    return options if keepalive_s is None else replace(options, keepalive_s=keepalive_s)


@app.command(
    epilog="Example: thinwire server --listen 0.0.0.0:7070 --tls-cert certs/server.pem --tls-key certs/server.key "
    "--tls-ca certs/ca.pem --token-file certs/server.token"
)
def server(
    context: typer.Context,
    listen: Annotated[str, typer.Option(help="Address to listen on; port 0 takes a free one.")] = "127.0.0.1:7070",
    checkpoint: options.Checkpoint = None,
    checkpoint_every: options.CheckpointEvery = options.CHECKPOINT_EVERY,
    resume: options.Resume = False,
    resume_if_there: options.ResumeIfThere = False,
    resume_step: options.ResumeStep = None,
    rejoin: Annotated[bool, typer.Option(help="Wait for a worker whose connection broke.")] = True,
    min_workers: options.MinWorkers = None,
    worker_grace_s: options.WorkerGrace = None,
    straggler_grace_s: options.StragglerGrace = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_ca: options.TlsCa = None,
    token_file: options.TokenFile = None,
    insecure: options.Insecure = False,
    health: Annotated[
        str | None,
        typer.Option(help="Address of a port at which grpc.health.v1 answers probes, in the clear: 0.0.0.0:7071."),
    ] = None,
    shape: options.Shape = None,
    journal: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Append a JSON line per gradient and update to this file.")
    ] = None,
    events: options.Events = False,
) -> None:
    """Serve one training: the first worker brings the model and the optimizer; ends when all workers have left."""
    core = cores.ServerCore(min_workers, straggler_grace_s)
    if worker_grace_s is not None and not rejoin:
        raise ConfigError(f"--worker-grace-s {worker_grace_s:g} is for workers that come again: leave --no-rejoin out")
    if worker_grace_s is None:
        worker_grace_s = ENDING_GRACE_S if min_workers is None else ELASTIC_GRACE_S
    credentials = Credentials(ca=tls_ca, cert=tls_cert, key=tls_key, token_file=token_file, insecure=insecure)
    resume = _resumes(checkpoint, checkpoint_every, resume, resume_if_there, resume_step)
    if not resume and checkpoint is not None and (there := checkpoint_files.files_at(checkpoint)):
        raise ConfigError(
            f"{str(there[0])!r} is the checkpoint of a training, which this one would replace: --resume goes on from "
            "it; for another training give another file, or remove it and those beside it"
        )
    check_apart(journal, _checkpoint_files(checkpoint), "the checkpoint is written")
    checkpointer = None
    if checkpoint is not None:
        context.with_resource(claim.claimed(checkpoint, resumes=resume))
        checkpointer = shard_checkpoints.Checkpointer(core, checkpoint, checkpoint_every, resumes=resume)
        if resume:
            checkpointer.resume(resume_step)
            if core.over:
                caution(
                    f"the training in {str(checkpoint)!r} has reached its end, {core.moment}, and nothing is left "
                    "to train: for another training give another file, or remove this one and those beside it"
                )
    ended, caught = threading.Event(), set[int]()

    def end(signum: int, _: object) -> None:
        caught.add(signum)
        ended.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, end)
    written = None if journal is None else journals.Journal(journal, core.step)
    handler = serving.serving(core, ended.set, checkpointer, grace_s=worker_grace_s if rejoin else 0.0, journal=written)
    # A frozen worker is noticed as soon as a dead one is given up.
    keepalive_s = None if min_workers is None else max(1.0, worker_grace_s / 2)
    transport = credentials.server(grpc_options(shape, keepalive_s=keepalive_s, health=health))
    writing = nullcontext() if checkpointer is None else closing(checkpointer)
    # What torch imports when an optimizer is made takes seconds, in which a server that listens would answer nobody.
    importlib.import_module("torch._dynamo")
    tell = Told()
    telling = nullcontext() if written is None else closing(written)
    with telling, writing, grpc_server.serve(handler, listen, options=transport) as running:
        if events:
            report(told.Listening(address=running.address))
        else:
            tell(f"listening on grpc://{running.address}; Ctrl-C ends it")
            if insecure:
                tell("insecure: whoever reaches this address can take part, or read what is sent")
        progress = ServingProgress(core, tell, time.monotonic, worker_grace_s, min_workers)
        over = False
        while not over:
            over = ended.wait(0.2) or running.wait(0)
            if not events:
                progress.look(running.bytes_received, running.bytes_sent)
        broken = signal.SIGTERM in caught and checkpointer is not None and rejoin
        stopped = f"{'Ctrl-C' if signal.SIGINT in caught else 'SIGTERM'} ended the server at {core.moment}"
        if broken:  # a scheduler or a supervisor may start it again: workers try to reach it, as after a crash
            running.stop(0)
        elif caught:  # else the workers' sessions would end without a word, and the shard would blame one of them
            handler.end(stopped)
    if not events:
        tell(progress.summary(running.bytes_received, running.bytes_sent))
    ranks = ", ".join(map(str, core.missing))
    if core.failed == stopped or (caught and ranks and not (broken or events or core.failed)):
        ended_early = f"{stopped}; workers {ranks} had not reached the training's end"
        raise Interrupted(ended_early) if signal.SIGINT in caught else ProtocolError(ended_early)
    if core.failed is not None:
        raise ProtocolError(core.failed)
    if broken and (not core.finished if events else ranks):  # whoever started all processes starts this one again
        whose = f" at {core.moment}: workers {ranks} go back with it" if ranks else ", and workers join it"
        raise ProtocolError(f"ended by SIGTERM{whose} where it is started again with --resume")
    if events:  # whoever started all processes knows which of the workers reached the end
        report(told.Served(wire_bytes_sent=running.bytes_sent, wire_bytes_received=running.bytes_received))
    elif ranks:
        raise ProtocolError(f"the training is over at {core.moment}, and workers {ranks} have not reached its end")


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
    resume: options.Resume = False,
    resume_if_there: options.ResumeIfThere = False,
    resume_step: options.ResumeStep = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_ca: options.TlsCa = None,
    token_file: options.TokenFile = None,
    insecure: options.Insecure = False,
    shape: options.Shape = None,
    events: options.Events = False,
    json: options.Json = None,
) -> None:
    """Train as one worker. All workers are started with the same options but `--rank`."""
    resume = _resumes(checkpoint, checkpoint_every, resume, resume_if_there, resume_step)
    for file in (telemetry, json):
        check_apart(file, _checkpoint_files(checkpoint), "the checkpoint is written")
    check_apart(json, [telemetry], "the step records are written")
    for each in server:  # before data are read and the model is made
        connection.server_address(each)
    if events and json == STANDARD_OUTPUT:
        raise ConfigError("--events and --json - both write to standard output: give --json a file")
    job, mine = jobs.Job(**vars(given)), None
    if checkpoint is not None:
        mine = checkpoints.WorkerCheckpoint(path=checkpoint, every=checkpoint_every, resume=resume, step=resume_step)
    credentials = Credentials(ca=tls_ca, cert=tls_cert, key=tls_key, token_file=token_file, insecure=insecure)
    transport = credentials.worker(rank, grpc_options(shape))
    tell = Told()

    def train(kept: checkpoints.WorkerCheckpoint | None, returning: bool) -> WorkerOutcome:
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
            returning=returning,
        )

    with nullcontext() if checkpoint is None else claim.claimed(checkpoint, resumes=resume):
        outcome = rejoining(train, mine)
    write_json(json, outcome)


def _resumes(file: Path | None, every: int, resume: bool, if_there: bool, step: int | None) -> bool:
    """Whether a role goes on from a checkpoint.

    Raises:
        ConfigError: options that are of use only beside others.
    """
    if step is not None and not resume:
        raise ConfigError(f"--resume-step {step} is of --resume, without which the training begins anew: give both")
    if (resume or if_there) and file is None:
        option = "--resume" if resume else "--resume-if-there"
        raise ConfigError(f"{option} goes on from a checkpoint: say which with --checkpoint FILE")
    if every != options.CHECKPOINT_EVERY and file is None:
        raise ConfigError("--checkpoint-every writes checkpoints: say where with --checkpoint FILE")
    return resume or (if_there and file is not None and bool(checkpoint_files.files_at(file)))


def _checkpoint_files(file: Path | None) -> list[Path]:
    """Returns a checkpoint's file, the one of before, and the one that keeps others away."""
    if file is None:
        return []
    return [file.with_name(file.name + ending) for ending in ("", checkpoint_files.PREVIOUS, claim.LOCK)]


def rejoining(
    train: Callable[[checkpoints.WorkerCheckpoint | None, bool], WorkerOutcome],
    kept: checkpoints.WorkerCheckpoint | None,
) -> WorkerOutcome:
    """Trains, and joins again where a shard no longer knows this worker.

    All workers and shards then go back to the newest step of which everybody has a checkpoint, and the run ends with
    the bits of one that nothing disturbed. A worker without checkpoints goes on with the shards' parameters and an
    empty residual. One that was away while the others went on does so from where they are, with the residuals of its
    newest checkpoint, unless it was to resume from a step of its own.

    Args:
        train: trains with these checkpoints; the second argument says whether it was in the training before.
        kept: this worker's checkpoints, if it writes any.

    Raises:
        StepMismatchError: as said.
    """
    returning = False
    while True:
        try:
            return train(kept, returning)
        except SessionLostError as error:
            returning = True
            # Where it is to go back to is agreed on; the step of the command line was that of the first time. There it
            # has the residuals of then, also where it went on with later ones meanwhile.
            if kept is not None:
                kept = replace(kept, step=None, residuals=False, resume=kept.resume and bool(kept.own()))
            caution(f"{error}. This worker joins again")
        except StepMismatchError as error:
            if not returning and (kept is None or not kept.resume or kept.step is not None):
                raise
            returning = False
            own = () if kept is None else kept.own()  # where it began anew, other files are of a run before
            there = any(step > 0 for step in own)
            if kept is not None:
                kept = replace(kept, resume=kept.resume and there, residuals=there, written=set(own))
            whose = "the residuals of its newest checkpoint" if there else "empty residuals"
            caution(f"{error}. This worker goes on where they are, with {whose}")


def open_metrics(
    rank: int, telemetry: Path | None, metrics_port: int | None, tensorboard: Path | None
) -> list[metrics.MetricsWriter]:
    """Opens the chosen metrics writers. All workers append to the file of JSON lines; worker 0 alone has the others."""
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
            loss = "the others were at the end" if late else f"loss {outcome.train_loss:.4f}"
            tell(f"{outcome.steps:,} steps in {outcome.seconds:.1f} s, {loss}")
