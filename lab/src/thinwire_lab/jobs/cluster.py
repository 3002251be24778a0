"""Servers and workers as real processes, each behind its own link.

With privileges the kernel makes the link: a network namespace for each process and `tc tbf` in both directions. Without
them each process's transport has a token bucket. An engine starts the processes, on this machine or on Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from thinwire.engines.engine import Engine
from thinwire.engines.events import Event, Listening
from thinwire.engines.roles import OnEvent, Roles, RunningRoles
from thinwire.errors import ConfigError, EngineError
from thinwire.extras import require
from thinwire.transports.links import Rate, parse_rate
from thinwire_lab.engines.local import LocalEngine
from thinwire_lab.engines.namespaces import Fabric, available
from thinwire_lab.engines.starters import Starter

Shaping = Literal["kernel", "application", "none"]
OnStart = Callable[[Mapping[str, int]], None]
OpenEngine = Callable[[Sequence[type[Event]], Sequence[str]], AbstractContextManager[Engine[Any]]]
"""Opens an engine for these kinds of events on these hosts."""
Private = Callable[[int | None], list[str]]
"""Returns a worker's options of credentials by its rank, or the servers'."""

SERVER = "server"
UNSET_CREDENTIALS = dict.fromkeys(
    ("THINWIRE_TLS_CERT", "THINWIRE_TLS_KEY", "THINWIRE_TLS_CA", "THINWIRE_TOKEN_FILE"), ""
)
"""Local processes ignore the environment's credentials, which belong to other trainings."""


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a run; `note` is the reason why the kernel does not make them."""

    shaping: Shaping
    rate: Rate
    note: str = ""


def choose_links(link: str | None, wanted: str = "auto") -> Links:
    """Chooses the shaping of links: `auto` prefers the kernel, `kernel` requires it, `application` avoids it."""
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
class Place:
    """Where roles run: their links, engine and credentials."""

    links: Links
    open_engine: OpenEngine | None = None
    starter: Starter | None = None
    private: Private = lambda rank: []

    @property
    def has_hosts(self) -> bool:
        """Whether each role starts on one of the nodes."""
        return self.links.shaping == "kernel" or self.open_engine is not None

    @contextmanager
    def opened(self, kinds: Sequence[type[Event]], hosts: Sequence[str]) -> Iterator[tuple[Engine[Any], Fabric | None]]:
        """Opens an engine for these kinds of events on these nodes, and the kernel's links, if any."""
        with ExitStack() as stack:
            fabric = None
            if self.links.shaping == "kernel":
                fabric = stack.enter_context(Fabric(dict.fromkeys(hosts, self.links.rate)))
            if self.open_engine is not None:
                yield stack.enter_context(self.open_engine(kinds, hosts)), fabric
            else:
                local = LocalEngine(
                    kinds, fabric=fabric, starter=self.starter, environment=UNSET_CREDENTIALS, lines=True
                )
                yield stack.enter_context(local), fabric

    def arguments(self, rank: int | None) -> list[str]:
        """Returns a command's options of links and credentials: a worker's by its rank, or the servers'."""
        if self.links.shaping == "kernel":
            return ["--insecure"]  # no other process has a link to these namespaces
        shape = ["--shape", str(self.links.rate)] if self.links.shaping == "application" else []
        return [*shape, *self.private(rank)]


def run_cluster(
    roles: Roles, place: Place, kinds: Sequence[type[Event]], on_event: OnEvent, *, on_start: OnStart | None = None
) -> dict[str, int]:
    """Starts servers and workers, passes their events on, and waits for their end.

    Returns the interface counters of the workers' nodes if the kernel shapes.
    """
    require("a parameter server", "grpc")
    if roles.servers_on_workers and place.links.shaping == "application":
        raise ConfigError(
            "--servers-on-workers: processes of one node share its link only with kernel shaping; use that, or no limit"
        )
    with place.opened([Listening, *kinds], roles.hosts) as (engine, fabric):
        running = RunningRoles(roles, engine, place.arguments, on_hosts=place.has_hosts)
        running.start_servers()
        running.start_workers()
        if on_start is not None:
            on_start(engine.pids)
        running.follow(on_event)
        return _interfaces(fabric, roles.worker_names) if fabric else {}


def _interfaces(fabric: Fabric, workers: Sequence[str]) -> dict[str, int]:
    """Returns the kernel's counts at the workers' links, with and without TCP/IP headers."""
    counters: dict[str, int] = {}
    for way, count in (("push", fabric.sent), ("pull", fabric.received)):
        counts = [count(worker) for worker in workers]
        counters[f"interface_bytes_{way}"] = sum(each.nbytes for each in counts)
        counters[f"interface_payload_bytes_{way}"] = sum(each.payload_nbytes for each in counts)
    return counters
