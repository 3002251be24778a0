"""Every design on every model for a few steps: does it finish, stay finite, and leave all replicas equal?

Strategy: one cluster of real processes for each model, whose workers train with one design after the other, each on a
server of its own; so that starting Python, which takes longer than the training, is paid once a model and not once a
pair. A pair that fails is reported and the next begins. Nothing is said of accuracy or speed: the runs are short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from thinwire.errors import ThinwireError
from thinwire.jobs.job import Job
from thinwire.jobs.run import choose_links, run_cluster
from thinwire.jobs.training import run_worker
from thinwire.policies.consistency import consistency
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports import grpc

TEXT_DATA = {"byte-transformer": "python-text"}
"""Models that do not train on images."""


def jobs(models: Sequence[str], designs: Sequence[str], *, data: str, steps: int, workers: int) -> list[Job]:
    """Returns a job for every pair, model by model. Raises ConfigError for a pair that cannot be."""
    return [
        Job(design=design, model=model, data=TEXT_DATA.get(model, data), workers=workers, steps=steps)
        for model in models
        for design in designs
    ]


def run_model(
    jobs: Sequence[Job], *, servers: int, on_row: Callable[[dict[str, Any]], None] = lambda row: None
) -> list[dict[str, Any]]:
    """Trains one model with every design and returns a row for each.

    Args:
        jobs: which differ in their design alone.
        servers: how many shards, each a process.
        on_row: hears of each pair when all its workers are done.

    Returns:
        Rows with `model`, `design`, `finished`, `steps`, `loss`, `finite`, `equal` (the replicas, where the design's
        consistency promises it; else None) and `error`.

    Raises:
        EngineError: a process died.
    """
    first = jobs[0]
    reports: list[list[dict[str, Any]]] = [[] for _ in jobs]
    rows: dict[int, dict[str, Any]] = {}

    def arguments(rank: int, addresses: list[str]) -> list[str]:
        words = ["bench", "designs-worker", "--rank", str(rank), "--workers", str(first.workers)]
        words += ["--model", first.model, "--data", first.data, "--steps", str(first.steps)]
        words += [word for job in jobs for word in ("--design", job.design)]
        return words + [word for shard in addresses for word in ("--server", shard)]

    def listen(_process: str, event: dict[str, Any]) -> None:
        if event.get("event") != "trained":
            return
        index = event["training"]
        reports[index].append(event)
        if len(reports[index]) == first.workers:
            rows[index] = _row(jobs[index], reports[index])
            on_row(rows[index])

    command = ("bench", "designs-server", "--trainings", str(len(jobs)))
    run_cluster(
        choose_links(None),
        first.workers,
        arguments,
        listen,
        servers=servers,
        server_command=command,
        servers_end=False,  # one whose workers all failed beforehand would wait for ever
    )
    return [rows[index] for index in range(len(jobs))]


def serve_trainings(trainings: int, listen: str, report: Callable[[dict[str, Any]], None]) -> None:
    """One shard of `trainings` trainings, each on a port of its own, until it is stopped."""
    host = listen.rpartition(":")[0]
    with ExitStack() as stack:
        servers = [stack.enter_context(grpc.serve(serving(ServerCore()), f"{host}:0")) for _ in range(trainings)]
        report({"event": "listening", "address": ",".join(server.address for server in servers)})
        for server in servers:
            server.wait()


def run_trainings(
    jobs: Sequence[Job], *, rank: int, shards: Sequence[str], report: Callable[[dict[str, Any]], None]
) -> None:
    """One worker of all trainings, in turn.

    Args:
        jobs: what to train.
        rank: this worker's number.
        shards: what each shard's process reported as its address: one for each training, with commas.
        report: hears a `trained` for each job, with `error` where it failed, and `done` at the end.
    """
    for index, addresses in enumerate(zip(*(shard.split(",") for shard in shards), strict=True)):
        found: dict[str, Any] = {"event": "trained", "training": index, "rank": rank, "error": None}
        try:
            servers = [f"grpc://{address}" for address in addresses]
            outcome = run_worker(jobs[index], rank=rank, servers=servers, report=lambda _: None)
            found |= {key: outcome[key] for key in ("steps", "train_loss", "weights")}
        except (ThinwireError, ArithmeticError, RuntimeError, ValueError) as error:
            found["error"] = f"{type(error).__name__}: {error}"
        report(found)
    report({"event": "done", "rank": rank})


def _row(job: Job, reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [f"worker {report['rank']}: {report['error']}" for report in reports if report["error"]]
    finished = not errors
    losses = [report["train_loss"] for report in reports if not report["error"]]
    promised = consistency(job.full_design().consistency).replicas_end_equal
    return {
        "model": job.model,
        "design": job.design,
        "finished": finished,
        "steps": min((report["steps"] for report in reports if not report["error"]), default=0),
        "loss": sum(losses) / len(losses) if losses else None,
        "finite": finished and all(math.isfinite(loss) for loss in losses),
        "equal": (finished and len({report["weights"] for report in reports}) == 1) if promised else None,
        "error": "; ".join(errors),
    }
