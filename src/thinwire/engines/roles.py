"""What runs in a training with servers, and how an engine starts it and follows it to its end."""

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
"""Returns what a worker's command, by its rank, or a server's has of the place where it runs."""

START_TIMEOUT_S = 120.0
WARNING = "warning:"
"""So a line of a process begins that warns; see `cli.main`."""


def own_command(*arguments: str) -> list[str]:
    """Returns the command line of this package's own command, as this Python runs it.

    Modules are not looked for in the folder in which it is started, unless this package was found there: there may be a
    random.py of the user's.
    """
    here = Path(__file__).parents[2] == Path.cwd()
    return [sys.executable, *(() if here else ("-P",)), "-m", "thinwire", *arguments]


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
        """Names of the shards, by index."""
        return [f"server {index}" for index in range(self.servers)]

    @property
    def worker_names(self) -> list[str]:
        """Names of the workers, by rank."""
        return [f"worker {rank}" for rank in range(self.workers)]

    @property
    def hosts(self) -> list[str]:
        """The nodes that are needed: shard i's is the i-th, and each worker's has its name."""
        return self.worker_names if self.servers_on_workers else [*self.server_names, *self.worker_names]


class RunningRoles:
    """Roles that an engine runs: started, found by their addresses, and followed to their ends.

    Args:
        roles: what runs.
        engine: what starts them.
        options: of every role's command, by its place.
        on_hosts: each role is started on one of the engine's hosts.
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
        _ = self._engine.pids  # waits until all are placed, which may take longer than to listen
        for name in names:
            self._addresses.append(self._engine.wait_for(name, Listening, START_TIMEOUT_S).address)

    def start_workers(self) -> None:
        """Starts the workers with the shards' addresses."""
        optional = self._roles.min_workers is not None
        for rank, name in enumerate(self._roles.worker_names):
            again = partial(self._worker, rank, again=True)
            self._start(name, name, self._worker(rank, again=False), again, optional=optional)

    def follow(self, on_event: OnEvent) -> None:
        """Passes on events until all have ended, or fewer workers are left than are needed."""
        lost = []
        alone: set[str] = set()
        """Servers that were started again: they know nothing of a worker that had left before, and wait for it."""
        for process, event in self._engine.events(besides=alone):
            if isinstance(event, Said):
                if event.text.startswith(WARNING):  # of the run; all processes may say the same
                    caution(event.text.removeprefix(WARNING).strip())
                continue
            on_event(process, event)
            if isinstance(event, Restarted) and process in self._roles.server_names:
                alone.add(process)
            if isinstance(event, Listening):  # again, and perhaps elsewhere: workers started later look there
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
        """Returns a call as it is, and a `thinwire` command with the options of every role."""
        return command if callable(command) else own_command(*command, "--events", *self._options(rank))
