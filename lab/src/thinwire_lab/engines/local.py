"""Starts and stops processes of this machine and reads their events.

Each process has a separate session, a thin link if there is a `Fabric`, and ends with its launcher (`parent_watch`). It
reports events on standard output; an error quotes its last other lines.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from thinwire.engines.engine import ENVIRONMENT, Again, Command, Engine, Role
from thinwire.engines.events import Event, Said, reader
from thinwire.errors import ConfigError, EngineError
from thinwire_lab.engines.namespaces import Fabric
from thinwire_lab.engines.starters import Process, Programs, Starter

PORT = 7070  # of servers in a fabric
_DRAIN_S = 2.0  # how long a process's children may keep its streams open after its end

Start = Callable[[Sequence[str]], Process]


def free_port() -> int:
    """Returns a free port of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class _Child(Role):
    """One process. It puts its name with each event, and at last with its exit status, into the engine's inbox."""

    def __init__(self, engine: LocalEngine, name: str, command: Sequence[str], start: Start, *role: Any) -> None:
        super().__init__(name, *role)  # again, restarts, optional
        self.engine, self.start = engine, start
        self.process = start(command)
        self.watcher = threading.Thread(target=self._watch, name=f"watch {name}", daemon=True)
        self.watcher.start()

    def signal(self, signum: int) -> None:
        """Sends a signal to the process and its children, if it still runs."""
        if self.process.poll() is None:
            self._signal_group(signum)

    def _watch(self) -> None:
        readers = [
            threading.Thread(target=self._read, args=(stream, reports), daemon=True)
            for stream, reports in ((self.process.stdout, True), (self.process.stderr, False))
            if stream is not None
        ]
        for each in readers:
            each.start()
        status = self.process.wait()
        # The process's children, such as data loaders, would keep the streams open and outlive the run.
        self._signal_group(signal.SIGKILL)
        for each in readers:
            each.join(_DRAIN_S)
        self.engine.inbox.put((self.name, status))

    def _read(self, stream: IO[str], reports: bool) -> None:
        with stream:
            for line in stream:
                event = self.engine.read(line) if reports else None
                if event is not None:
                    self.engine.inbox.put((self.name, event))
                elif line.strip():
                    self.tail.append(line.rstrip())
                    if self.engine.passes_lines:
                        self.engine.inbox.put((self.name, Said(text=line.rstrip())))

    def _signal_group(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signum)


class LocalEngine(Engine[_Child]):
    """The processes of one run, each with one thread for its arithmetic.

    Start processes from a thread that lives until `stop`, such as the main thread: a child ends with the thread that
    started it. The methods are for one thread at a time.
    """

    def __init__(
        self,
        kinds: Sequence[type[Event]],
        *,
        fabric: Fabric | None = None,
        environment: Mapping[str, str] | None = None,
        grace_s: float = 5.0,
        lines: bool = False,
        starter: Starter | None = None,
    ) -> None:
        super().__init__()
        self.read = reader(kinds)
        self.passes_lines = lines
        self.inbox = queue.SimpleQueue[tuple[str, Event | int]]()
        self._fabric, self._grace_s, self._starter = fabric, grace_s, starter or Programs()
        self._environment = ENVIRONMENT | dict(environment or {})

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.process.pid for name, child in self._roles.items()}

    def listen_at(self, host: str) -> str:
        return "127.0.0.1:0" if self._fabric is None else f"{self._fabric.addresses[host]}:{PORT}"

    def start(
        self,
        name: str,
        command: Command,
        *,
        host: str | None = None,
        restarts: int = 0,
        again: Again | None = None,
        optional: bool = False,
    ) -> None:
        if name in self.running:
            raise ConfigError(f"a process {name!r} runs already; give each process another name")
        if (host is None) != (self._fabric is None):
            raise ConfigError(f"{name}: host {host!r}, fabric {self._fabric}; give both or neither")
        network = [] if self._fabric is None or host is None else [self._fabric.namespace(host)]

        def in_its_place(command: Sequence[str]) -> Process:
            return self._starter.start(command, self._environment, network)

        self._spawn(name, command, in_its_place, again or (lambda: command), restarts, optional)

    def _spawn(self, name: str, command: Command, start: Start, again: Again, restarts: int, optional: bool) -> None:
        if callable(command):
            raise ConfigError(f"{name}: a local process runs a program, and this is a call")
        try:
            self._roles[name] = _Child(self, name, command, start, again, restarts, optional)
        except (OSError, EngineError) as error:
            raise EngineError(f"{name} could not be started: {error}") from error

    def signal(self, name: str, signum: int) -> None:
        """Sends a signal to a process and its children, if it still runs."""
        self._roles[name].signal(signum)

    def stop(self) -> None:
        """Sends SIGTERM to every process, waits `grace_s` for all, and kills the rest."""
        for child in self._roles.values():
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        for child in self._roles.values():
            child.watcher.join(max(0.0, deadline - time.monotonic()))
        for child in self._roles.values():
            child.signal(signal.SIGKILL)
        for child in self._roles.values():
            child.watcher.join()

    def receive(self, timeout_s: float | None) -> tuple[str, Event | int] | None:
        try:
            name, came = self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(came, int):
            self._roles[name].status = came
        return name, came

    def _start_again(self, role: _Child, command: Command) -> None:
        self._spawn(role.name, command, role.start, role.again, role.restarts - 1, role.optional)

    def poll(self, timeout_s: float) -> tuple[str, Event] | None:
        """Returns the next event with its role; None at the timeout, or where a role ended well meanwhile.

        Raises:
            EngineError: a role failed that is not optional; everything has been stopped.
        """
        name, came = self._next(timeout_s) or ("", None)
        return (name, came) if isinstance(came, Event) else None
