"""Start processes on this machine, read what they report, and leave nothing behind.

Each process runs a command that the caller gives, behind its own thin link where there is a `Fabric`, in a session of
its own, so that Ctrl-C in a terminal reaches the launcher alone, and is killed with its launcher (`parent_watch`).
Processes report events (`events`) on standard output; the last other lines that they print are kept, and shown when one
fails. The first to fail ends the run: the others are stopped and an EngineError says who and why.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, NoReturn, TypeVar

from thinwire.engines.events import Event, Lost, Restarted, Said, reader
from thinwire.engines.namespaces import Fabric
from thinwire.engines.starters import Process, Programs, Starter
from thinwire.errors import ConfigError, EngineError

TAIL_LINES = 20  # of a process's output, kept for the error message
_DRAIN_S = 2.0  # after an end: how long its streams may stay open in somebody else's hands
_SETTLE_S = 0.5  # after a failure: how long others may take to fail of the same cause, to be named too
# Workers that share a machine slow each other down several times over when each takes every core. Unbuffered, so that
# what a process reports is read when it happens.
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
}

E = TypeVar("E", bound=Event)
Again = Callable[[], Sequence[str] | None]
"""The command of a later start; None where there is none yet."""
Start = Callable[[Sequence[str]], Process]
"""Starts a command where its process belongs."""


class _Child:
    """One process. What it reports, and last of all its exit status, goes to the engine's inbox beside its name."""

    def __init__(
        self,
        engine: LocalEngine,
        name: str,
        command: Sequence[str],
        start: Start,
        again: Again,
        restarts: int,
        optional: bool,
    ) -> None:
        self.engine, self.name, self.restarts, self.optional = engine, name, restarts, optional
        self.start, self.again = start, again
        self.status: int | None = None  # once the engine has read its end
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.process = start(command)
        self.watcher = threading.Thread(target=self._watch, name=f"watch {name}", daemon=True)
        self.watcher.start()

    def signal(self, signum: int) -> None:
        """Sends a signal to the process and to whatever it has started; nothing if it has ended."""
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
        # Its own children (data loaders, say) would hold the streams open and outlive the run.
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


class LocalEngine:
    """The processes of one run, each with one thread for its arithmetic.

    Start processes from a thread that lives until `stop` (the main one, as a rule): a child is tied to the
    thread that started it. The methods are for one thread at a time.

    Args:
        kinds: the classes of the events that the processes report.
        fabric: the thin links to put processes on, or None to use the machine's own network.
        environment: variables to set for each process on top of what it inherits.
        grace_s: how long `stop` waits between asking and killing, in seconds.
        lines: pass on what processes print besides events, as `Said`.
        starter: makes the processes; by default each is a program of its own.

    Example:
        >>> import sys
        >>> class Sum(Event, frozen=True, kw_only=True):
        ...     value: int
        >>> report = 'import json; print(json.dumps({"event": "sum", "value": 1 + 1}))'
        >>> with LocalEngine([Sum]) as engine:
        ...     engine.start("worker 0", [sys.executable, "-c", report])
        ...     list(engine.events())
        [('worker 0', Sum(value=2))]
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
        self.read = reader(kinds)
        self.passes_lines = lines
        self.inbox = queue.SimpleQueue[tuple[str, Event | int]]()
        self._fabric, self._grace_s, self._starter = fabric, grace_s, starter or Programs()
        self._environment = ENVIRONMENT | dict(environment or {})
        self._children: dict[str, _Child] = {}
        self._unread: deque[tuple[str, Event]] = deque()  # came while wait_for was waiting for another

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of everything started, by name."""
        return {name: child.process.pid for name, child in self._children.items()}

    @property
    def running(self) -> set[str]:
        """The processes that are not known to have ended."""
        return {name for name, child in self._children.items() if child.status is None}

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        host: str | None = None,
        namespaces: Sequence[str] = (),
        restarts: int = 0,
        again: Again | None = None,
        optional: bool = False,
    ) -> None:
        """Starts a process.

        Args:
            name: what to call it in events and errors; taken again only where its process has ended.
            argv: the command, program first.
            host: the fabric's host to run it in; it must have one if and only if the engine has a fabric.
            namespaces: files of others that it enters.
            restarts: how often it is started again where it fails, before that ends the run.
            again: returns the command of a later start, or None where it cannot be started again; by default the same.
            optional: the run goes on where it fails for good.

        Raises:
            ConfigError: a name that is in use, a host without a fabric or the reverse, an unknown host.
            EngineError: the fabric is closed, or no process could be made. A command that cannot be found
                shows later, as a process that ended with status 127.
        """
        if name in self.running:
            raise ConfigError(f"a process called {name!r} has been started already; give each its own name")
        if (host is None) != (self._fabric is None):
            given = "no host was given" if host is None else f"host {host!r} was given"
            links = "no fabric" if self._fabric is None else "a fabric"
            raise ConfigError(f"{name}: {given}, but the engine has {links}; give both or neither")

        network = [] if self._fabric is None or host is None else [self._fabric.namespace(host)]

        def in_its_place(command: Sequence[str]) -> Process:
            return self._starter.start(command, self._environment, [*network, *namespaces])

        self._spawn(name, argv, in_its_place, again or (lambda: argv), restarts, optional)

    def _spawn(
        self, name: str, command: Sequence[str], start: Start, again: Again, restarts: int, optional: bool
    ) -> None:
        try:
            self._children[name] = _Child(self, name, command, start, again, restarts, optional)
        except (OSError, EngineError) as error:
            raise EngineError(f"{name} could not be started: {error}") from error

    def wait_for(self, process: str, kind: type[E], timeout_s: float) -> E:
        """Waits until a process reports an event of one kind, such as a server its address. Others are kept.

        Raises:
            ConfigError: no such process.
            EngineError: it ended first, another failed, or the time was over; everything has been stopped.
        """
        if process not in self._children:
            raise ConfigError(f"no process called {process}; there are {list(self._children)}")
        deadline = time.monotonic() + timeout_s
        others: list[tuple[str, Event]] = []
        try:
            while self._unread or self._children[process].status is None:
                came = self._next(max(0.0, deadline - time.monotonic()))
                if came is None:
                    self._fail(f"{process} did not report {kind.__name__} within {timeout_s:g} s", [process])
                name, event = came
                if name == process and isinstance(event, kind):
                    return event
                if isinstance(event, Event):
                    others.append((name, event))
            self._fail(f"{process} ended before it reported {kind.__name__}", [process])
        finally:
            self._unread.extendleft(reversed(others))

    def events(self, *, silence_s: float | None = None, besides: Collection[str] = ()) -> Iterator[tuple[str, Event]]:
        """Yields what the processes report, each with its process, until all have ended well.

        Args:
            silence_s: how long all may be silent before the run counts as stuck, in seconds; None is for ever.
            besides: processes that are not waited for; looked at again before every wait.

        Raises:
            EngineError: a process failed, or all were silent too long; everything has been stopped.
        """
        while self._unread or self.running.difference(besides):
            came = self._next(silence_s)
            if came is None:
                self._fail(f"no process has reported anything for {silence_s:g} s", sorted(self._children))
            if isinstance(came[1], Event):
                yield came[0], came[1]

    def poll(self, timeout_s: float) -> tuple[str, Event] | None:
        """Returns what a process reports next; None where nobody does in time, or one ended well meanwhile.

        Raises:
            EngineError: a process failed that is not optional; everything has been stopped.
        """
        name, came = self._next(timeout_s) or ("", None)
        return (name, came) if isinstance(came, Event) else None

    def signal(self, name: str, signum: int) -> None:
        """Sends a signal to a process and to whatever it has started; nothing if it has ended."""
        self._children[name].signal(signum)

    def stop(self) -> None:
        """Asks every process to end (SIGTERM), waits `grace_s` for all, kills the rest. May be called again."""
        for child in self._children.values():
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        for child in self._children.values():
            child.watcher.join(max(0.0, deadline - time.monotonic()))
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        for child in self._children.values():
            child.watcher.join()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _next(self, timeout_s: float | None) -> tuple[str, Event | int] | None:
        """What came next, or None if nothing did in time. Raises EngineError if it is a failure."""
        if self._unread:
            return self._unread.popleft()
        came = self._receive(timeout_s)
        if came is not None and isinstance(came[1], int) and came[1] != 0:
            if settled := self._restart(came[0]):
                return came[0], settled
            # When one dies, its peers may be heard of before it is: the first to be heard of is not named alone.
            deadline = time.monotonic() + _SETTLE_S
            while (left := deadline - time.monotonic()) > 0 and self._receive(left) is not None:
                pass
            failed = [name for name, child in self._children.items() if child.status and not child.optional]
            self._fail(None, sorted(failed, key=lambda name: name != came[0]))
        return came

    def _restart(self, name: str) -> Restarted | Lost | None:
        """Starts a process that failed again, or gives it up; None where that ends the run."""
        child = self._children[name]
        if child.restarts and (command := child.again()) is not None:
            self._spawn(name, command, child.start, child.again, child.restarts - 1, child.optional)
            return Restarted(reason=_describe(child.status), left=child.restarts - 1)
        return Lost(reason=_end_of(child)) if child.optional else None

    def _receive(self, timeout_s: float | None) -> tuple[str, Event | int] | None:
        try:
            name, came = self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(came, int):
            self._children[name].status = came
        return name, came

    def _fail(self, what: str | None, processes: Collection[str]) -> NoReturn:
        """Stops everything and raises, saying how each of these ended and the last lines that it wrote."""
        running = [name for name, child in self._children.items() if child.status is None]
        ends = {name: _describe(self._children[name].status) for name in processes}
        self.stop()
        parts = [] if what is None else [what]
        parts += [f"{name} {_end_of(self._children[name], end)}" for name, end in ends.items()]
        if running:
            parts.append(f"stopped: {', '.join(running)}")
        raise EngineError("\n".join(parts))


def _end_of(child: _Child, end: str = "") -> str:
    """How a process ended, and the last lines that it wrote."""
    lines = "".join(f"\n    {line}" for line in list(child.tail)) or " none"
    return f"{end or _describe(child.status)}; last lines:{lines}"


def _describe(status: int | None) -> str:
    """An exit status in words.

    Example:
        >>> _describe(3), _describe(-9)
        ('ended with exit status 3', 'was killed by SIGKILL (out of memory, or by hand)')
    """
    if status is None:
        return "was running"
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (" (out of memory, or by hand)" if name == "SIGKILL" else "")
