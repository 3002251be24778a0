"""The servers and workers of a training, and how an engine starts and follows them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from thinwire.cautions import caution
from thinwire.engines.engine import Again, Command, Engine
from thinwire.engines.events import Event, Listening, Lost, Restarted, Said
from thinwire.errors import ConfigError, EngineError

OnEvent = Callable[[str, Event], None]
Options = Callable[[int | None], list[str]]
"""Returns the options of a worker's command, by its rank, or of a server's, that depend on its place."""

START_TIMEOUT_S = 120.0
WARNING = "warning:"
"""The begin of a warning line; see `cli.main`."""


def own_command(*arguments: str) -> list[str]:
    """Returns the command line of this package's own command, as this Python runs it.

    Python does not import modules from the current folder, which may hold a random.py, unless this package is there.
    """
    here = Path(__file__).parents[2] == Path.cwd()
    return [sys.executable, *(() if here else ("-P",)), "-m", "thinwire", *arguments]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The servers and workers of a training.

    Args:
        workers: how many.
        worker: returns the `thinwire` command of a worker, or a call, from its rank, the servers' addresses, and
            whether it is a restart.
        servers: how many shards.
        server: returns the `thinwire` command of a shard, up to `--listen`, from its index and whether it is a restart.
            It reports `Listening`.
        servers_on_workers: shard i runs on worker i's node, and both share its link.
        servers_return: a failed shard can be restarted; else its failure ends the run.
        min_workers: the run continues while so many workers have not failed; None: it needs all.
        max_restarts: restarts of each process that fails.

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
        """Names of the shards, by index."""
        return [f"server {index}" for index in range(self.servers)]

    @property
    def worker_names(self) -> list[str]:
        """Names of the workers, by rank."""
        return [f"worker {rank}" for rank in range(self.workers)]

    @property
    def hosts(self) -> list[str]:
        """The needed nodes: shard i's is the i-th, and each worker's has its name."""
        return self.worker_names if self.servers_on_workers else [*self.server_names, *self.worker_names]


class RunningRoles:
    """Starts roles on an engine, finds their addresses, and follows them to their ends.

    Args:
        roles: the servers and workers.
        engine: starts them.
        options: of every role's command, by its place.
        on_hosts: each role starts on one of the engine's hosts.
    """

    def __init__(self, roles: Roles, engine: Engine[Any], options: Options, *, on_hosts: bool) -> None:
        self._roles, self._engine, self._options, self._on_hosts = roles, engine, options, on_hosts
        self._addresses: list[str] = []

    def start_servers(self) -> None:
        """Starts the shards, and waits until all listen."""
        names = self._roles.server_names
        for index, (name, host) in enumerate(zip(names, self._roles.hosts, strict=False)):
            command = self._server(index, self._engine.listen_at(host), again=False)
            self._start(name, host, command, partial(self._server_again, index))
        _ = self._engine.pids  # waits until all are placed, which may take longer than START_TIMEOUT_S
        for name in names:
            self._addresses.append(self._engine.wait_for(name, Listening, START_TIMEOUT_S).address)

    def start_workers(self) -> None:
        """Starts the workers with the shards' addresses."""
        optional = self._roles.min_workers is not None
        for rank, name in enumerate(self._roles.worker_names):
            again = partial(self._worker, rank, again=True)
            self._start(name, name, self._worker(rank, again=False), again, optional=optional)

    def follow(self, on_event: OnEvent) -> None:
        """Passes on events until all have ended, or too few workers are left."""
        lost = []
        alone: set[str] = set()
        """Restarted servers: they do not know that a worker has left, and wait for it."""
        for process, event in self._engine.events(besides=alone):
            if isinstance(event, Said):
                if event.text.startswith(WARNING):  # all processes may print the same warning
                    caution(event.text.removeprefix(WARNING).strip())
                continue
            on_event(process, event)
            if isinstance(event, Restarted) and process in self._roles.server_names:
                alone.add(process)
            if isinstance(event, Listening):  # after a restart, perhaps on another machine: later workers connect there
                self._addresses[self._roles.server_names.index(process)] = event.address
            if isinstance(event, Lost):
                lost.append(f"{process} {event.reason}")
                needed = self._roles.min_workers
                if self._roles.workers - len(lost) < (needed or self._roles.workers):
                    raise EngineError("\n".join([f"fewer than {needed} workers are left", *lost]))

    def _start(self, name: str, host: str, command: Command, again: Again, *, optional: bool = False) -> None:
        where, restarts = host if self._on_hosts else None, self._roles.max_restarts
        self._engine.start(name, command, host=where, restarts=restarts, again=again, optional=optional)

    def _server(self, index: int, listen: str, *, again: bool) -> Command:
        return self._complete([*self._roles.server(index, again), "--listen", listen], None)

    def _server_again(self, index: int) -> Command | None:
        if not self._roles.servers_return or index >= len(self._addresses):
            return None
        before, now = self._addresses[index], self._engine.listen_at(self._roles.hosts[index])
        same = before.rpartition(":")[0] == now.rpartition(":")[0]  # else it is on another machine
        return self._server(index, before if same else now, again=True)

    def _worker(self, rank: int, *, again: bool) -> Command:
        return self._complete(self._roles.worker(rank, self._addresses, again), rank)

    def _complete(self, command: Command, rank: int | None) -> Command:
        """Returns a call unchanged, and a `thinwire` command with the options of every role."""
        return command if callable(command) else own_command(*command, "--events", *self._options(rank))
