"""`thinwire server`: one shard of a parameter server, by hand, on any machine."""

from __future__ import annotations

import importlib
import signal
import threading
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cautions import caution
from thinwire.cli import options
from thinwire.cli.console import Interrupted, Told, report
from thinwire.cli.lazy import lazily
from thinwire.cli.outputs import check_apart
from thinwire.cli.resuming import checkpoint_names, resuming
from thinwire.cli.serving_progress import ServingProgress
from thinwire.engines.events import Listening, Served
from thinwire.errors import ConfigError, ProtocolError
from thinwire.security import Credentials
from thinwire.transports.grpc import GrpcOptions
from thinwire.transports.links import Shaping, parse_rate

with lazily():
    from thinwire.runtime import checkpoint as checkpoint_files
    from thinwire.runtime import claim, serving, shard_checkpoints
    from thinwire.runtime import journal as journals
    from thinwire.server import core as cores
    from thinwire.transports.grpc import server as grpc_server

app = typer.Typer()

ENDING_GRACE_S, ELASTIC_GRACE_S = 60.0, 10.0
"""Seconds that a server waits for a worker whose connection broke, before the training ends or continues without it."""


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
    resume: options.Resume = None,
    min_workers: options.MinWorkers = None,
    worker_grace_s: options.WorkerGrace = None,
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
    core = cores.ServerCore(min_workers)
    if worker_grace_s is None:
        worker_grace_s = ENDING_GRACE_S if min_workers is None else ELASTIC_GRACE_S
    credentials = Credentials(ca=tls_ca, cert=tls_cert, key=tls_key, token_file=token_file, insecure=insecure)
    start = resuming(checkpoint, checkpoint_every, resume)
    if not start.resumes and checkpoint is not None and (there := checkpoint_files.files_at(checkpoint)):
        raise ConfigError(
            f"{str(there[0])!r} is the checkpoint of a training, which this one would replace: --resume goes on from "
            "it; for another training give another file, or remove it and those beside it"
        )
    check_apart(journal, checkpoint_names(checkpoint), "the checkpoint is written")
    checkpointer = None
    if checkpoint is not None:
        context.with_resource(claim.claimed(checkpoint, resumes=start.resumes))
        checkpointer = shard_checkpoints.Checkpointer(core, checkpoint, checkpoint_every, resumes=start.resumes)
        if start.resumes:
            checkpointer.resume(start.step)
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
    handler = serving.serving(core, ended.set, checkpointer, grace_s=worker_grace_s, journal=written)
    # A frozen worker is noticed as soon as a dead one is given up.
    keepalive_s = None if min_workers is None else max(1.0, worker_grace_s / 2)
    transport = credentials.server(grpc_options(shape, keepalive_s=keepalive_s, health=health))
    writing = nullcontext() if checkpointer is None else closing(checkpointer)
    # torch imports this module when it makes an optimizer. It takes seconds, in which the server could not answer.
    importlib.import_module("torch._dynamo")
    tell = Told()
    telling = nullcontext() if written is None else closing(written)
    with telling, writing, grpc_server.serve(handler, listen, options=transport) as running:
        if events:
            report(Listening(address=running.address))
        else:
            tell(f"listening on grpc://{running.address}; Ctrl-C ends it")
            if insecure:
                tell("insecure: every machine that reaches this address can join the training and read its traffic")
        progress = ServingProgress(core, tell, time.monotonic, worker_grace_s, min_workers)
        over = False
        while not over:
            over = ended.wait(0.2) or running.wait(0)
            if not events:
                progress.look(running.bytes_received, running.bytes_sent)
        broken = signal.SIGTERM in caught and checkpointer is not None and worker_grace_s > 0
        stopped = f"{'Ctrl-C' if signal.SIGINT in caught else 'SIGTERM'} ended the server at {core.moment}"
        if broken:  # a scheduler or a supervisor may start it again: workers try to reach it, as after a crash
            running.stop(0)
        elif caught:  # else the workers would lose their sessions, and the shard would blame one of them
            handler.end(stopped)
    if not events:
        tell(progress.summary(running.bytes_received, running.bytes_sent))
    ranks = core.missing
    numbers = " and ".join(filter(None, [", ".join(map(str, ranks[:-1])), *map(str, ranks[-1:])]))
    workers, have = (f"worker{'s' * (len(ranks) > 1)} {numbers}", "have" if len(ranks) > 1 else "has")
    if core.failed == stopped or (caught and ranks and not (broken or events or core.failed)):
        ended_early = f"{stopped}; {workers} had not reached the training's end"
        raise Interrupted(ended_early) if signal.SIGINT in caught else ProtocolError(ended_early)
    if core.failed is not None:
        raise ProtocolError(core.failed)
    if broken and (not core.finished if events else ranks):  # its engine or supervisor starts it again
        whose = f" at {core.moment}: {workers} will go back with it" if ranks else ", and workers join it"
        raise ProtocolError(f"ended by SIGTERM{whose} where it is started again with --resume")
    if events:  # the engine that started all processes knows which workers reached the end
        report(Served(wire_bytes_sent=running.bytes_sent, wire_bytes_received=running.bytes_received))
    elif ranks:
        raise ProtocolError(f"the training is over at {core.moment}, and {workers} {have} not reached its end")
