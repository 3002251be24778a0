"""What a step costs the server: CPU seconds of its process, by design and number of workers, on an unlimited link.

Strategy: the shard, its transport and the sessions are the real ones. Only the workers are replaced, by one process
that plays them all with frames made beforehand from a model's real gradients and never decodes what comes down; so
sixteen workers fit on a machine whose cores the server needs. CPU seconds are the kernel's for the server's process,
all its threads together, from the end of the first steps to that of the last: other work on the machine does not count.
"""

from __future__ import annotations

import resource
import statistics
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thinwire.codecs import Codec
from thinwire.errors import ConfigError
from thinwire.hooks.planning import Planned, make_plan
from thinwire.jobs.job import Job
from thinwire.jobs.run import choose_links, run_cluster
from thinwire.jobs.training import warm_up
from thinwire.policies.consistency import Bsp
from thinwire.policies.designs import design as find_design
from thinwire.runtime.connect import connect
from thinwire.runtime.driver import WorkerDriver
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports import grpc
from thinwire.transports.base import HandlerFactory, Sender, Server
from thinwire.worker.conversation import Conversation
from thinwire.workloads.batches import Batches
from thinwire.workloads.data import data
from thinwire.workloads.evaluate import cross_entropy
from thinwire.workloads.models import model as make_model
from thinwire.workloads.recipes import build_optimizer

SETS = 8
"""Different gradients, of so many steps of one worker; the workers take them in turn, each beginning with another."""
WARM = 5
"""Steps before the measurement: the first ones load kernels and fill buffers."""

Report = Callable[[dict[str, Any]], None]


def bench(
    designs: Sequence[str],
    workers: Sequence[int],
    *,
    model: str,
    data: str,
    steps: int,
    rounds: int,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Measures every design with every number of workers, in turn, `rounds` times.

    Returns:
        Rows with `design`, `workers`, `cpu_seconds_per_step` (the median), `fastest`, `slowest` and
        `bytes_per_step` (up and down, all workers).
    """
    cells = [(design, count) for count in workers for design in designs]
    measured: dict[tuple[str, int], list[dict[str, Any]]] = {cell: [] for cell in cells}
    for _ in range(rounds):
        for name, count in cells:
            measured[name, count].append(_once(name, count, model, data, steps))
    rows = []
    for (name, count), results in measured.items():
        seconds = [result["cpu_seconds_per_step"] for result in results]
        row = {
            "design": name,
            "workers": count,
            "model": model,
            "steps": steps,
            "cpu_seconds_per_step": statistics.median(seconds),
            "fastest": min(seconds),
            "slowest": max(seconds),
            "bytes_per_step": results[0]["bytes_per_step"],
        }
        rows.append(row)
        on_row(row)
    return rows


def verdicts(rows: Sequence[dict[str, Any]], base: str) -> list[dict[str, Any]]:
    """Holds each row against `base` with as many workers, and against its own design with the fewest.

    Returns:
        For each row, `cost`: its CPU seconds over the base's; and `growth`: its CPU seconds over those with the fewest
        workers, divided by how many times as many workers there are. Up to 1 it grows no worse than linearly.
    """
    seconds = {(row["design"], row["workers"]): row["cpu_seconds_per_step"] for row in rows}
    fewest = min(row["workers"] for row in rows)
    return [
        {
            "design": name,
            "workers": count,
            "cost": own / seconds[base, count],
            "growth": own / seconds[name, fewest] * fewest / count,
        }
        for (name, count), own in seconds.items()
    ]


def _once(design: str, workers: int, model: str, data: str, steps: int) -> dict[str, Any]:
    heard: dict[str, Any] = {}

    def arguments(_rank: int, addresses: list[str]) -> list[str]:
        words = ["bench", "server-load", "--server", f"grpc://{addresses[0]}", "--design", design]
        return [*words, "--workers", str(workers), "--model", model, "--data", data, "--steps", str(steps)]

    def listen(_process: str, event: dict[str, Any]) -> None:
        if event.get("event") == "served":
            heard.update(event)

    run_cluster(
        choose_links(None), 1, arguments, listen, server_command=("bench", "server-shard", "--steps", str(steps))
    )
    return heard


# ---- the server's process


def serve_measured(steps: int, listen: str, report: Report) -> None:
    """Serves one training and reports the CPU seconds of its steps from `WARM` to `steps`, and the bytes of each."""
    core = ServerCore()
    ended = threading.Event()
    marks: dict[int, tuple[float, int]] = {}
    inner = serving(core, ended.set)

    def factory(sender: Sender) -> Any:
        handler: Any = inner(sender)
        return _Marking(handler, lambda: _mark(core, marks, running))

    measured: HandlerFactory = factory
    running: list[Server] = []
    with grpc.serve(measured, listen) as server:
        running.append(server)
        report({"event": "listening", "address": server.address})
        ended.wait()
    if core.failed is not None:
        raise ConfigError(f"the load does not fit the server: {core.failed}")
    (before, sent), (after, sent_after) = marks[WARM], marks[steps]
    report(
        {
            "event": "served",
            "cpu_seconds_per_step": (after - before) / (steps - WARM),
            "bytes_per_step": (sent_after - sent) // (steps - WARM),
        }
    )


class _Marking:
    """A handler that calls `mark` after each packet."""

    def __init__(self, inner: Any, mark: Callable[[], None]) -> None:
        self._inner, self._mark = inner, mark
        self.opened, self.closed = inner.opened, inner.closed

    def received(self, peer: int, packet: bytes) -> None:
        self._inner.received(peer, packet)
        self._mark()


def _mark(core: ServerCore, marks: dict[int, tuple[float, int]], running: list[Server]) -> None:
    if core.step not in marks and running:
        used = resource.getrusage(resource.RUSAGE_SELF)
        nbytes = running[0].bytes_received + running[0].bytes_sent
        marks[core.step] = used.ru_utime + used.ru_stime, nbytes


# ---- the load


def run_load(server: str, *, design: str, workers: int, model: str, data: str, steps: int, report: Report) -> None:
    """Plays all workers: pushes frames that are ready and waits for every table's update, step by step.

    Raises:
        ConfigError: a design that needs the workers' part of the arithmetic, or a model with buffers.
    """
    torch.set_num_threads(1)
    planned, sets = make_frames(design, model=model, data=data, workers=workers)
    [plan] = planned.plans
    conversations = [Conversation(0, plan, rank=rank) for rank in range(workers)]
    drivers = [WorkerDriver([each], [connect(server, connect_timeout_s=60)]) for each in conversations]
    playing = list(zip(conversations, drivers, strict=True))
    for conversation, driver in playing:
        driver.run(conversation.join())
        if conversation.asked_for_values:
            first = find_design("fp32").up
            values = tuple(first.encode(each.tensor.detach()) for each in planned.tensors)
            driver.run(conversation.send_values(values))
    rates = tuple(1e-3 for _ in plan.groups)
    tables = range(len(plan.tables))
    for conversation, driver in playing[1:]:  # their initial values; worker 0 has its own
        for table in tables:
            driver.run(conversation.pull(table, 0))
    for step in range(steps):
        for conversation, driver in playing:
            frames = sets[(step + conversation.rank) % SETS]
            for table in reversed(tables):  # as a backward pass would
                if conversation.push(step, table, frames[table]):
                    driver.run(conversation.flush(step, rates))
            driver.run(conversation.flush(step, rates))
            conversation.end_step()
        for conversation, driver in playing:
            for table in tables:
                driver.run(conversation.pull(table, step + 1))
    for driver in drivers:
        driver.close()
    report({"event": "done", "rank": 0})


def make_frames(design: str, *, model: str, data: str, workers: int) -> tuple[Planned, list[list[bytes]]]:
    """Returns the plan and `SETS` lists of frames, one frame for each table, of a model's first gradients.

    Raises:
        ConfigError: a design or a model whose workers do more than push and pull.
    """
    made = find_design(design)
    if made.downlink == "weights" or made.share_scales:
        raise ConfigError(
            f"{design}: its workers do more than push frames; measure a design that pulls deltas or gradients"
        )
    job = Job(design=design, model=model, data=data, workers=workers)
    dataset, recipe = _data(job), job.recipe()
    network = make_model(model, num_classes=dataset.num_classes, in_shape=dataset.in_shape, seed=0)
    optimizer = build_optimizer(network, recipe)
    planned = make_plan(
        network,
        optimizer,
        made,
        workers=workers,
        consistency=Bsp(),
    )
    if any(tensor.state for tensor in planned.tensors):
        raise ConfigError(f"{model} has buffers, which travel by other rules; measure a model without them")
    codecs: list[Codec] = [tensor.up for tensor in planned.tensors]
    warm_up(made.up)
    contexts = [codec.context(each.tensor.detach()) for codec, each in zip(codecs, planned.tensors, strict=True)]
    batches = Batches(dataset, rank=0, workers=workers, batch=recipe.batch, seed=0, augment=recipe.augment)
    sets = []
    for _ in range(SETS):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        cross_entropy(network(inputs), targets).backward()  # type: ignore[no-untyped-call]
        gradients = [each.tensor.grad for each in planned.tensors]
        sets.append(
            [context.encode(grad) for context, grad in zip(contexts, gradients, strict=True) if grad is not None]
        )
        optimizer.step()
    return planned, sets


def _data(job: Job) -> Any:
    return data(job.data, root=job.data_root)
