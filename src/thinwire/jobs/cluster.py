"""Servers and workers as real processes, each behind its own link.

With privileges the link is the kernel's: a network namespace for each process and `tc tbf` in both directions; without,
a token bucket inside each process's transport. An engine starts the processes: this machine's, or another's (`on_ray`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from thinwire.engines.engine import Command, Engine
from thinwire.engines.events import Event, Lost, Restarted, Said
from thinwire.engines.links import Rate, parse_rate
from thinwire.engines.local import LocalEngine
from thinwire.engines.namespaces import Fabric, available
from thinwire.engines.starters import Starter, own_command
from thinwire.errors import ConfigError, EngineError
from thinwire.extras import require
from thinwire.jobs.events import Listening

Shaping = Literal["kernel", "application", "none"]
OnEvent = Callable[[str, Event], None]
OnStart = Callable[[Mapping[str, int]], None]
OpenEngine = Callable[[Sequence[type[Event]], Sequence[str]], AbstractContextManager[Engine[Any]]]
"""Opens an engine for these kinds of events on these hosts."""
Private = Callable[[int | None], list[str]]
"""Returns a worker's options of credentials by its rank, or the servers'."""

START_TIMEOUT_S = 120.0
SERVER = "server"
WARNING = "warning:"
"""So a line of a process begins that warns; see `cli.main`."""
UNKNOWN = dict.fromkeys(("THINWIRE_TLS_CERT", "THINWIRE_TLS_KEY", "THINWIRE_TLS_CA", "THINWIRE_TOKEN_FILE"), "")
"""Of the environment: whose certificate somebody has for another training is nothing to processes of this machine."""


@dataclass(frozen=True, slots=True)
class Links:
    """How the links of a run are made; `note` says why not by the kernel, where that was wanted."""

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


def run_cluster(
    links: Links,
    workers: int,
    worker_command: Callable[[int, list[str]], Command],
    kinds: Sequence[type[Event]],
    on_event: OnEvent,
    *,
    servers: int = 1,
    servers_on_workers: bool = False,
    server_command: Callable[[int], list[str]] = lambda index: ["server"],
    max_restarts: int = 0,
    server_again: Callable[[int], list[str]] | None = None,
    worker_again: Callable[[int, list[str]], Command] | None = None,
    min_workers: int | None = None,
    on_start: OnStart | None = None,
    open_engine: OpenEngine | None = None,
    starter: Starter | None = None,
    private: Private = lambda rank: [],
) -> dict[str, int]:
    """Starts servers and workers, passes on what they report, and returns when all have ended.

    Args:
        links: how the links are made.
        workers: how many.
        worker_command: the `thinwire` command of a worker, or a call, by rank and server addresses.
        kinds: the classes of the events that the processes report, besides `Listening`.
        on_event: called with each process's name and event.
        servers: how many shards.
        servers_on_workers: shard i runs on worker i's node, and both share its link.
        server_command: the `thinwire` command of a shard, by index, up to `--listen`; it reports `Listening`.
        max_restarts: how often each process that fails is started again.
        server_again: the command of a shard that is started again; None: that ends the run.
        worker_again: the command of a worker that is started again; None: the same.
        min_workers: the run goes on while so many workers have not failed; None: with all of them.
        on_start: called with the ids of all processes, by name, when they have been started.
        open_engine: what starts them; None: processes of this machine.
        starter: makes those; by default each is a program of its own.
        private: the options of every role's credentials.

    Returns:
        With kernel shaping the interface counters of the workers' nodes, named as in `RunOutcome`.

    Raises:
        ConfigError: servers on workers where links are made by each process for itself, or more servers than workers.
        EngineError: a process failed; the message holds its last output. Nothing is left running.
    """
    require("a parameter server", "grpc")
    if servers_on_workers and links.shaping == "application":
        raise ConfigError(
            "a server on every worker's node shares that node's link, and application shaping gives each process a "
            "link of its own; use kernel shaping, or no limit"
        )
    if servers_on_workers and servers > workers:
        raise ConfigError(f"{servers} servers on the nodes of {workers} workers; at most one on each is possible")
    shards = [f"{SERVER} {index}" for index in range(servers)]
    names = [f"worker {rank}" for rank in range(workers)]
    with ExitStack() as stack:
        fabric = None
        hosts = names if servers_on_workers else [*shards, *names]
        if links.shaping == "kernel":
            fabric = stack.enter_context(Fabric(dict.fromkeys(hosts, links.rate)))
            private = lambda rank: ["--insecure"]  # noqa: E731  # nobody else has a link to these namespaces
        if open_engine is None:
            local = LocalEngine([Listening, *kinds], fabric=fabric, starter=starter, environment=UNKNOWN, lines=True)
            engine: Engine[Any] = stack.enter_context(local)
        else:
            engine = stack.enter_context(open_engine([Listening, *kinds], hosts))
        on_hosts = fabric is not None or open_engine is not None
        shape = ["--shape", str(links.rate)] if links.shaping == "application" else []
        addresses: list[str] = []

        def complete(command: Command, rank: int | None = None) -> Command:
            if callable(command):
                return command
            return own_command(*command, "--events", *shape, *private(rank))

        def server_again_at(index: int) -> Command | None:
            if server_again is None or index >= len(addresses):
                return None
            before, now = addresses[index], engine.listen_at(hosts[index])
            same = before.rpartition(":")[0] == now.rpartition(":")[0]  # else it is on another machine
            return complete([*server_again(index), "--listen", before if same else now])

        def worker_again_at(rank: int) -> Command:
            return complete((worker_again or worker_command)(rank, addresses), rank)

        for index, shard in enumerate(shards):
            engine.start(
                shard,
                complete([*server_command(index), "--listen", engine.listen_at(hosts[index])]),
                host=hosts[index] if on_hosts else None,
                restarts=max_restarts,
                again=partial(server_again_at, index),
            )
        addresses.extend(engine.wait_for(shard, Listening, START_TIMEOUT_S).address for shard in shards)
        for rank, name in enumerate(names):
            engine.start(
                name,
                complete(worker_command(rank, addresses), rank),
                host=name if on_hosts else None,
                restarts=max_restarts,
                again=partial(worker_again_at, rank),
                optional=min_workers is not None,
            )
        if on_start is not None:
            on_start(engine.pids)
        lost = []
        alone: set[str] = set()
        """Servers that were started again: they know nothing of a worker that had left before, and wait for it."""
        for process, event in engine.events(besides=alone):
            if isinstance(event, Said):
                if event.text.startswith(WARNING):  # what it says of the run; all processes may say the same
                    warnings.warn(event.text.removeprefix(WARNING).strip(), UserWarning, stacklevel=2)
                continue
            on_event(process, event)
            if isinstance(event, Restarted) and process in shards:
                alone.add(process)
            if isinstance(event, Listening):  # again, and perhaps elsewhere: workers started later look there
                addresses[shards.index(process)] = event.address
            if isinstance(event, Lost):
                lost.append(f"{process} {event.reason}")
                if workers - len(lost) < (min_workers or workers):
                    raise EngineError("\n".join([f"fewer than {min_workers} workers are left", *lost]))
        return _interfaces(fabric, names) if fabric else {}


def _interfaces(fabric: Fabric, workers: Sequence[str]) -> dict[str, int]:
    """What the kernel counted at the workers' links: everything, and what is left without TCP/IP headers."""
    counters: dict[str, int] = {}
    for way, count in (("push", fabric.sent), ("pull", fabric.received)):
        counts = [count(worker) for worker in workers]
        counters[f"interface_bytes_{way}"] = sum(each.nbytes for each in counts)
        counters[f"interface_packets_{way}"] = sum(each.packets for each in counts)
        counters[f"interface_payload_bytes_{way}"] = sum(each.payload_nbytes for each in counts)
    return counters
