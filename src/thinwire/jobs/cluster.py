"""Servers and workers as real processes, each behind its own link.

With privileges the link is the kernel's: a network namespace for each process and `tc tbf` in both directions; without,
a token bucket inside each process's transport. An engine starts the processes: this machine's, or another's (`on_ray`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from thinwire.cautions import caution
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


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What runs.

    Args:
        workers: how many.
        worker: returns the `thinwire` command of a worker, or a call: by rank, the servers' addresses, and whether it
            is started again.
        servers: how many shards.
        server: returns the `thinwire` command of a shard, up to `--listen`: by index, and whether it is started again.
            It reports `Listening`.
        servers_on_workers: shard i runs on worker i's node, and both share its link.
        servers_return: a shard that fails can be started again; else that ends the run.
        min_workers: the run goes on while so many workers have not failed; None: with all of them.
        max_restarts: how often each process that fails is started again.

    Raises:
        ConfigError: more servers than workers on whose nodes they would be.
    """

    workers: int
    worker: Callable[[int, list[str], bool], Command]
    servers: int = 1
    server: Callable[[int, bool], list[str]] = lambda index, again: ["server"]
    servers_on_workers: bool = False
    servers_return: bool = False
    min_workers: int | None = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if self.servers_on_workers and self.servers > self.workers:
            raise ConfigError(
                f"{self.servers} servers on the nodes of {self.workers} workers; at most one on each is possible"
            )

    @property
    def server_names(self) -> list[str]:
        """What the shards are called, by index."""
        return [f"{SERVER} {index}" for index in range(self.servers)]

    @property
    def worker_names(self) -> list[str]:
        """What the workers are called, by rank."""
        return [f"worker {rank}" for rank in range(self.workers)]

    @property
    def hosts(self) -> list[str]:
        """The nodes that are needed: shard i's is the i-th, and each worker's has its name."""
        return self.worker_names if self.servers_on_workers else [*self.server_names, *self.worker_names]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where roles run: behind which links, started by whom, with whose credentials.

    Args:
        links: how the links are made.
        open_engine: what starts processes; None: this machine does.
        starter: of this machine's processes; by default each is a program of its own.
        private: the options of every role's credentials; where the kernel makes the links there are none.
    """

    links: Links
    open_engine: OpenEngine | None = None
    starter: Starter | None = None
    private: Private = lambda rank: []

    @property
    def has_hosts(self) -> bool:
        """Whether each role has to be started on one of the nodes."""
        return self.links.shaping == "kernel" or self.open_engine is not None

    @contextmanager
    def opened(self, kinds: Sequence[type[Event]], hosts: Sequence[str]) -> Iterator[tuple[Engine[Any], Fabric | None]]:
        """Opens an engine for these kinds of events on these nodes, and their links where the kernel makes them."""
        with ExitStack() as stack:
            fabric = None
            if self.links.shaping == "kernel":
                fabric = stack.enter_context(Fabric(dict.fromkeys(hosts, self.links.rate)))
            if self.open_engine is not None:
                yield stack.enter_context(self.open_engine(kinds, hosts)), fabric
            else:
                local = LocalEngine(kinds, fabric=fabric, starter=self.starter, environment=UNKNOWN, lines=True)
                yield stack.enter_context(local), fabric

    def arguments(self, rank: int | None) -> list[str]:
        """Returns what a worker's command, by its rank, or a server's has of this place."""
        if self.links.shaping == "kernel":
            return ["--insecure"]  # nobody else has a link to these namespaces
        shape = ["--shape", str(self.links.rate)] if self.links.shaping == "application" else []
        return [*shape, *self.private(rank)]


def run_cluster(
    roles: Roles, place: Place, kinds: Sequence[type[Event]], on_event: OnEvent, *, on_start: OnStart | None = None
) -> dict[str, int]:
    """Starts servers and workers, passes on what they report, and returns when all have ended.

    Args:
        roles: what runs.
        place: where.
        kinds: the classes of the events that the processes report, besides `Listening`.
        on_event: called with each process's name and event.
        on_start: called with the ids of all processes, by name, when they have been started.

    Returns:
        With kernel shaping the interface counters of the workers' nodes, named as in `RunOutcome`.

    Raises:
        ConfigError: servers on workers' nodes where links are made by each process for itself.
        EngineError: a process failed; the message holds its last output. Nothing is left running.
    """
    require("a parameter server", "grpc")
    if roles.servers_on_workers and place.links.shaping == "application":
        raise ConfigError(
            "a server on every worker's node shares that node's link, and application shaping gives each process a "
            "link of its own; use kernel shaping, or no limit"
        )
    with place.opened([Listening, *kinds], roles.hosts) as (engine, fabric):
        running = _Running(roles, place, engine)
        running.start_servers()
        running.start_workers()
        if on_start is not None:
            on_start(engine.pids)
        running.follow(on_event)
        return _interfaces(fabric, roles.worker_names) if fabric else {}


class _Running:
    """Roles that run in a place: started, found by their addresses, and followed to their ends."""

    def __init__(self, roles: Roles, place: Place, engine: Engine[Any]) -> None:
        self._roles, self._place, self._engine = roles, place, engine
        self._servers, self._workers, self._hosts = roles.server_names, roles.worker_names, roles.hosts
        self._addresses: list[str] = []

    def start_servers(self) -> None:
        """Starts the shards, and waits until all listen."""
        for index, (name, host) in enumerate(zip(self._servers, self._hosts, strict=False)):
            self._engine.start(
                name,
                self._server(index, self._engine.listen_at(host), again=False),
                host=host if self._place.has_hosts else None,
                restarts=self._roles.max_restarts,
                again=partial(self._server_again, index),
            )
        self._engine.wait_started()
        for name in self._servers:
            self._addresses.append(self._engine.wait_for(name, Listening, START_TIMEOUT_S).address)

    def start_workers(self) -> None:
        for rank, name in enumerate(self._workers):
            self._engine.start(
                name,
                self._worker(rank, again=False),
                host=name if self._place.has_hosts else None,
                restarts=self._roles.max_restarts,
                again=partial(self._worker, rank, again=True),
                optional=self._roles.min_workers is not None,
            )

    def follow(self, on_event: OnEvent) -> None:
        """Passes on what is reported until all have ended, or fewer workers are left than are needed."""
        lost = []
        alone: set[str] = set()
        """Servers that were started again: they know nothing of a worker that had left before, and wait for it."""
        for process, event in self._engine.events(besides=alone):
            if isinstance(event, Said):
                if event.text.startswith(WARNING):  # what it says of the run; all processes may say the same
                    caution(event.text.removeprefix(WARNING).strip())
                continue
            on_event(process, event)
            if isinstance(event, Restarted) and process in self._servers:
                alone.add(process)
            if isinstance(event, Listening):  # again, and perhaps elsewhere: workers started later look there
                self._addresses[self._servers.index(process)] = event.address
            if isinstance(event, Lost):
                lost.append(f"{process} {event.reason}")
                needed = self._roles.min_workers
                if self._roles.workers - len(lost) < (needed or self._roles.workers):
                    raise EngineError("\n".join([f"fewer than {needed} workers are left", *lost]))

    def _server(self, index: int, listen: str, *, again: bool) -> Command:
        return self._complete([*self._roles.server(index, again), "--listen", listen], None)

    def _server_again(self, index: int) -> Command | None:
        if not self._roles.servers_return or index >= len(self._addresses):
            return None
        before, now = self._addresses[index], self._engine.listen_at(self._hosts[index])
        same = before.rpartition(":")[0] == now.rpartition(":")[0]  # else it is on another machine
        return self._server(index, before if same else now, again=True)

    def _worker(self, rank: int, *, again: bool) -> Command:
        return self._complete(self._roles.worker(rank, self._addresses, again), rank)

    def _complete(self, command: Command, rank: int | None) -> Command:
        """Returns what is started: a call as it is, a `thinwire` command with what every role is told."""
        return command if callable(command) else own_command(*command, "--events", *self._place.arguments(rank))


def _interfaces(fabric: Fabric, workers: Sequence[str]) -> dict[str, int]:
    """What the kernel counted at the workers' links: everything, and what is left without TCP/IP headers."""
    counters: dict[str, int] = {}
    for way, count in (("push", fabric.sent), ("pull", fabric.received)):
        counts = [count(worker) for worker in workers]
        counters[f"interface_bytes_{way}"] = sum(each.nbytes for each in counts)
        counters[f"interface_packets_{way}"] = sum(each.packets for each in counts)
        counters[f"interface_payload_bytes_{way}"] = sum(each.payload_nbytes for each in counts)
    return counters
