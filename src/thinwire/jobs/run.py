"""One run of one design: start the processes, hear them, and write down what came out.

Every process is real and every byte crosses a link. With privileges the link is the kernel's: a network namespace
for each process and `tc tbf` in both directions; without, a token bucket inside each process's transport. The
outcome says which (`shaping`), and with kernel shaping it holds the interface counters beside our own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from thinwire.engines.links import Rate, parse_rate
from thinwire.engines.local import LocalEngine
from thinwire.engines.namespaces import Fabric, available
from thinwire.errors import ConfigError, EngineError
from thinwire.jobs.checkpoints import RunCheckpoints
from thinwire.jobs.job import Job
from thinwire.policies.consistency import consistency

Shaping = Literal["kernel", "application", "none"]
OnEvent = Callable[[str, dict[str, Any]], None]

PORT = 7070
START_TIMEOUT_S = 120.0
SERVER = "server"


@dataclass(frozen=True, slots=True)
class Links:
    """How this run's links are made, and why not better."""

    shaping: Shaping
    rate: Rate
    note: str = ""


def choose_links(link: str | None, wanted: str = "auto") -> Links:
    """Decides who shapes the links.

    Args:
        link: a rate, or None for no limit.
        wanted: `auto` takes the kernel where it may, `kernel` insists, `application` never asks for privileges.

    Raises:
        ConfigError: a rate or a choice that cannot be.
        EngineError: `kernel`, and it is not possible here.
    """
    rate = parse_rate(link or "none")
    if wanted not in ("auto", "kernel", "application"):
        raise ConfigError(f"shaping {wanted!r}; allowed are auto, kernel and application")
    if wanted == "application":
        return Links("application" if rate.bps else "none", rate)
    if rate.bps is None and wanted == "auto":
        return Links("none", rate)
    possible, reason = available()
    if possible:
        return Links("kernel", rate)
    if wanted == "kernel":
        raise EngineError(f"the kernel cannot shape links here: {reason}")
    return Links("application", rate, f"kernel shaping is not possible here: {reason}")


def run(
    job: Job,
    *,
    shaping: str = "auto",
    on_event: OnEvent = lambda process, event: None,
    watch: Sequence[str] = (),
    keep: RunCheckpoints | None = None,
) -> dict[str, Any]:
    """Trains once and returns the outcome: at least the keys that `train --json` promises.

    Args:
        job: what to train.
        shaping: see `choose_links`.
        on_event: hears everything that a process reports, as it happens.
        watch: further options of every worker: where its telemetry goes.
        keep: where and how often every process writes a checkpoint, and whether to go on from there.

    Raises:
        ConfigError: there is nothing to resume, or a job that cannot be kept.
        EngineError: a process failed; the message holds its last words. Nothing is left running.
    """
    links = choose_links(job.link, shaping)
    step: int | None = None
    if keep is not None:
        keep.check(job)
        step = keep.newest(job) if keep.resume else None

    curve: list[dict[str, float]] = []

    def listen(process: str, event: dict[str, Any]) -> None:
        if event.get("event") == "accuracy":
            curve.append({key: event[key] for key in ("step", "seconds", "accuracy")})
        on_event(process, event)

    outcomes, interfaces = run_cluster(
        links,
        job.workers,
        lambda rank, addresses: [
            *worker_arguments(job, rank, addresses),
            *watch,
            *([] if keep is None else keep.arguments(keep.worker(rank), step)),
        ],
        listen,
        servers=job.shards,
        servers_on_workers=job.servers_on_workers,
        server_options=lambda index: [] if keep is None else keep.arguments(keep.server(index), step),
    )
    return summarise(job, links, outcomes, curve) | interfaces


def run_cluster(
    links: Links,
    workers: int,
    arguments: Callable[[int, list[str]], list[str]],
    on_event: OnEvent,
    *,
    servers: int = 1,
    servers_on_workers: bool = False,
    server_command: Sequence[str] = ("server",),
    servers_end: bool = True,
    server_options: Callable[[int], list[str]] = lambda index: [],
) -> tuple[dict[int, dict[str, Any]], dict[str, int]]:
    """Starts servers and workers, each behind its own link, and hears them to the end.

    Args:
        links: how the links are made.
        workers: how many.
        arguments: of a worker's command, by rank and server addresses.
        on_event: hears everything that a process reports.
        servers: how many shards.
        servers_on_workers: shard i lives on worker i's node, and both share its link.
        server_command: what a shard runs, up to `--listen`; it reports `listening` with its `address`.
        servers_end: whether shards end by themselves; otherwise they are stopped once the workers are done.
        server_options: further options of each shard.

    Returns:
        What each rank reported as `done`, and with kernel shaping the interface counters of the workers' nodes.

    Raises:
        ConfigError: servers on workers where links are made by each process for itself, or more servers than workers.
    """
    if servers_on_workers and links.shaping == "application":
        raise ConfigError(
            "a server on every worker's node shares that node's link, and application shaping gives each process a "
            "link of its own; use kernel shaping, or no limit"
        )
    if servers_on_workers and servers > workers:
        raise ConfigError(f"{servers} servers on the nodes of {workers} workers; at most one on each is possible")
    shards = [f"{SERVER} {index}" for index in range(servers)]
    names = [f"worker {rank}" for rank in range(workers)]
    outcomes: dict[int, dict[str, Any]] = {}
    with ExitStack() as stack:
        fabric = None
        if links.shaping == "kernel":
            hosts = names if servers_on_workers else [*shards, *names]
            fabric = stack.enter_context(Fabric(dict.fromkeys(hosts, links.rate)))
        engine = stack.enter_context(LocalEngine(fabric=fabric))
        shape = ["--shape", str(links.rate)] if links.shaping == "application" else []

        def start(name: str, host: str, *command: str) -> None:
            argv = [sys.executable, "-m", "thinwire", *command, "--events", *shape]
            engine.start(name, argv, host=host if fabric else None)

        for index, shard in enumerate(shards):
            host = names[index] if servers_on_workers else shard
            address = f"{fabric.addresses[host]}:{PORT}" if fabric else "127.0.0.1:0"
            start(shard, host, *server_command, "--listen", address, *server_options(index))
        addresses = [engine.wait_for(shard, "listening", START_TIMEOUT_S).data["address"] for shard in shards]
        for rank, name in enumerate(names):
            start(name, name, *arguments(rank, addresses))
        for event in engine.events(None if servers_end else names):
            on_event(event.process, event.data)
            if event.data.get("event") == "done":
                outcomes[event.data["rank"]] = event.data
        return outcomes, _interfaces(fabric, names) if fabric else {}


def worker_arguments(job: Job, rank: int, addresses: Sequence[str]) -> list[str]:
    """Returns the command line of one worker, the same that a person would type."""
    arguments = ["worker", "--rank", str(rank)]
    for address in addresses:
        arguments += ["--server", f"grpc://{address}"]
    for option, value in (
        ("--design", job.design),
        ("--model", job.model),
        ("--data", job.data),
        ("--workers", job.workers),
        ("--steps", job.steps),
        ("--seconds", job.seconds),
        ("--seed", job.seed),
        ("--batch", job.batch),
        ("--lr", job.lr),
        ("--eval-every", job.eval_every),
        ("--data-root", job.data_root),
        ("--codec-up", job.codec_up),
        ("--codec-down", job.codec_down),
        ("--consistency", job.consistency),
        ("--placement", job.placement),
        ("--compression", job.compression),
        ("--transmission", job.transmission),
    ):
        if value is not None:
            arguments += [option, str(value)]
    return arguments


def summarise(
    job: Job, links: Links, outcomes: dict[int, dict[str, Any]], curve: list[dict[str, float]]
) -> dict[str, Any]:
    """Sums up the workers' reports.

    Payload and wire bytes, and values, are sums over all workers; bits per value and the ratio come from the payload of
    everything that travelled, uncompressed small tensors included.

    Raises:
        EngineError: the replicas ended with different weights, which no design here allows.
    """
    first = outcomes[0]
    digests = {outcome["weights"] for outcome in outcomes.values()}
    design = job.full_design()
    if len(digests) > 1 and consistency(design.consistency).replicas_end_equal:
        raise EngineError(f"the workers ended with {len(digests)} different models; they must be equal bit for bit")
    total = {
        key: sum(outcome["traffic"].get(key, 0) for outcome in outcomes.values())
        for key in (
            "payload_bytes_push",
            "payload_bytes_pull",
            "values_push",
            "values_pull",
            "wire_bytes_push",
            "wire_bytes_pull",
            "encode_seconds",
            "decode_seconds",
            "wait_seconds",
            "late_pushes",
            "skipped_updates",
        )
    }
    payload_bits = 8 * (total["payload_bytes_push"] + total["payload_bytes_pull"])
    recipe = job.recipe()
    return {
        "design": job.design,
        "model": job.model,
        "data": job.data,
        "workers": job.workers,
        "servers": job.shards,
        "servers_on_workers": job.servers_on_workers,
        "steps": first["steps"],
        "link": str(links.rate),
        "seed": job.seed,
        "seconds": first["seconds"],
        "seconds_per_step": first["seconds_per_step"],
        "test_accuracy": first["test_accuracy"],
        "train_loss": sum(outcome["train_loss"] for outcome in outcomes.values()) / len(outcomes),
        "payload_bytes_push": int(total["payload_bytes_push"]),
        "payload_bytes_pull": int(total["payload_bytes_pull"]),
        "wire_bytes_push": int(total["wire_bytes_push"]),
        "wire_bytes_pull": int(total["wire_bytes_pull"]),
        "bits_per_value_push": _ratio(8 * total["payload_bytes_push"], total["values_push"]),
        "bits_per_value_pull": _ratio(8 * total["payload_bytes_pull"], total["values_pull"]),
        "compression_ratio": _ratio(32 * (total["values_push"] + total["values_pull"]), payload_bits),
        "shaping": links.shaping,
        "choices": design.choices(),
        "placement": first["placement"],
        "late_pushes": int(total["late_pushes"]),
        "skipped_updates": int(total["skipped_updates"]),
        "batch": recipe.batch,
        "lr": recipe.lr,
        "test_loss": first["test_loss"],
        **{key: first[key] for key in ("test_accuracy_ema",) if key in first},
        "residual_ratio": first["residual_ratio"],
        "weights": first["weights"],
        "seconds_encode": total["encode_seconds"] / job.workers,
        "seconds_decode": total["decode_seconds"] / job.workers,
        "seconds_wait": total["wait_seconds"] / job.workers,
        "curve": curve,
    }


def _interfaces(fabric: Fabric, workers: list[str]) -> dict[str, int]:
    """What the kernel counted at the workers' links: everything, and what is left without TCP/IP headers."""
    sent = [fabric.sent(worker) for worker in workers]
    received = [fabric.received(worker) for worker in workers]
    return {
        "interface_bytes_push": sum(count.nbytes for count in sent),
        "interface_bytes_pull": sum(count.nbytes for count in received),
        "interface_packets_push": sum(count.packets for count in sent),
        "interface_packets_pull": sum(count.packets for count in received),
        "interface_payload_bytes_push": sum(count.payload_nbytes for count in sent),
        "interface_payload_bytes_pull": sum(count.payload_nbytes for count in received),
    }


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
