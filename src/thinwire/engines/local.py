"""Start processes on this machine, read what they report, and leave nothing behind.

Each process runs a command that the caller gives, behind its own thin link where there is a `Fabric`. Processes report
events (`events`) on standard output; everything else they print is kept, and shown when one fails. The first to fail
ends the run: the others are stopped and an EngineError says who and why.

The engine knows nothing of training: neither what the commands do nor what their events mean.
"""

from __future__ import annotations

import queue
import signal
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import NoReturn, TypeVar

from thinwire.engines.child import Child, Ended, Inbox, Reported
from thinwire.engines.events import Event, reader
from thinwire.engines.namespaces import Fabric
from thinwire.errors import ConfigError, EngineError

_SETTLE_S = 0.5  # after a failure: how long others may take to fail of the same cause, to be named too
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

E = TypeVar("E", bound=Event)


class LocalEngine:
    """The processes of one run.

    Start processes from a thread that lives until `stop` (the main one, as a rule): a child is tied to the
    thread that started it. The methods are for one thread at a time.

    Args:
        kinds: the classes of the events that the processes report.
        fabric: the thin links to put processes on, or None to use the machine's own network.
        num_threads: threads for each process's arithmetic libraries; None leaves the choice to them. Workers that
            share a machine slow each other down several times over when each takes every core.
        environment: variables to set for each process on top of what it inherits.
        grace_s: how long `stop` waits between asking and killing, in seconds.

    Raises:
        ConfigError: fewer than one thread.

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
        num_threads: int | None = 1,
        environment: Mapping[str, str] | None = None,
        grace_s: float = 5.0,
    ) -> None:
        if num_threads is not None and num_threads < 1:
            raise ConfigError(f"{num_threads} threads for each process; expected 1 or more")
        self._read = reader(kinds)
        self._fabric = fabric
        # Unbuffered, so that what a process reports is read when it happens.
        self._environment = {"PYTHONUNBUFFERED": "1"}
        if num_threads is not None:
            self._environment |= dict.fromkeys(_THREAD_LIMITS, str(num_threads))
        self._environment |= environment or {}
        self._grace_s = grace_s
        self._children: dict[str, Child] = {}
        self._inbox: Inbox = queue.SimpleQueue()
        self._unread: deque[Reported] = deque()  # came while wait_for was waiting for another
        self._statuses: dict[str, int] = {}

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of everything started, by name."""
        return {name: child.process.pid for name, child in self._children.items()}

    def start(self, name: str, argv: Sequence[str], *, host: str | None = None) -> None:
        """Starts a process.

        Args:
            name: what to call it in events and errors; each name once.
            argv: the command, program first.
            host: the fabric's host to run it in; it must have one if and only if the engine has a fabric.

        Raises:
            ConfigError: a name used twice, a host without a fabric or the reverse, an unknown host.
            EngineError: the fabric is closed, or no process could be made. A command that cannot be found
                shows later, as a process that ended with status 127.
        """
        if name in self._children:
            raise ConfigError(f"a process called {name!r} has been started already; give each its own name")
        if (host is None) != (self._fabric is None):
            given = "no host was given" if host is None else f"host {host!r} was given"
            links = "no fabric" if self._fabric is None else "a fabric"
            raise ConfigError(f"{name}: {given}, but the engine has {links}; give both or neither")
        # `env` sets them in the child: the engine need not read its own environment to add to it.
        command = ["env", *(f"{key}={value}" for key, value in self._environment.items()), *argv]
        if self._fabric is not None and host is not None:
            command = self._fabric.inside(host, command)
        try:
            self._children[name] = Child(name, command, self._read, self._inbox)
        except OSError as error:
            raise EngineError(f"{name} could not be started: {error}") from error

    def wait_for(self, process: str, kind: type[E], timeout_s: float) -> E:
        """Waits until a process reports an event of one kind, such as a server its address. Others are kept.

        Raises:
            ConfigError: no such process.
            EngineError: it ended first, another failed, or the time was over; everything has been stopped.
        """
        self._check_known({process})
        deadline = time.monotonic() + timeout_s
        others: list[Reported] = []
        try:
            while self._unread or process not in self._statuses:
                came = self._next(max(0.0, deadline - time.monotonic()))
                if came is None:
                    self._fail(f"{process} did not report {kind.__name__} within {timeout_s:g} s", {process})
                if isinstance(came, Reported):
                    if came.process == process and isinstance(came.event, kind):
                        return came.event
                    others.append(came)
            self._fail(f"{process} ended before it reported {kind.__name__}", {process})
        finally:
            self._unread.extendleft(reversed(others))

    def events(
        self, until: Collection[str] | None = None, *, silence_s: float | None = None
    ) -> Iterator[tuple[str, Event]]:
        """Yields what the processes report, each with its process, until some of them have ended well.

        Args:
            until: the processes whose end (with status 0) ends the run; every process if not given.
            silence_s: how long all may be silent before the run counts as stuck, in seconds; None is for ever.

        Raises:
            ConfigError: an unknown process in `until`.
            EngineError: a process failed, or all were silent too long; everything has been stopped.
        """
        awaited = set(self._children if until is None else until)
        self._check_known(awaited)
        while self._unread or not awaited <= self._statuses.keys():
            came = self._next(silence_s)
            if came is None:
                self._fail(f"no process has reported anything for {silence_s:g} s", sorted(awaited))
            if isinstance(came, Reported):
                yield came.process, came.event

    def stop(self) -> None:
        """Asks every process to end (SIGTERM), waits `grace_s` for all, kills the rest. May be called again."""
        for child in self._children.values():
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        for child in self._children.values():
            child.join(max(0.0, deadline - time.monotonic()))
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        for child in self._children.values():
            child.join(None)

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _check_known(self, processes: set[str]) -> None:
        if unknown := processes - self._children.keys():
            raise ConfigError(f"no process called {', '.join(sorted(unknown))}; there are {list(self._children)}")

    def _next(self, timeout_s: float | None) -> Reported | Ended | None:
        """What came next, or None if nothing did in time. Raises EngineError if it is a failure."""
        if self._unread:
            return self._unread.popleft()
        came = self._receive(timeout_s)
        if isinstance(came, Ended) and came.status != 0:
            # When one dies, its peers may be heard of before it is: the first to be heard of is not named alone.
            deadline = time.monotonic() + _SETTLE_S
            while (left := deadline - time.monotonic()) > 0 and self._receive(left) is not None:
                pass
            self._fail(None, [came.process, *(n for n, s in self._statuses.items() if s != 0 and n != came.process)])
        return came

    def _receive(self, timeout_s: float | None) -> Reported | Ended | None:
        try:
            came = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(came, Ended):
            self._statuses[came.process] = came.status
        return came

    def _fail(self, what: str | None, processes: Collection[str]) -> NoReturn:
        """Stops everything and raises, saying how each of these ended and the last lines that it wrote."""
        running = [name for name in self._children if name not in self._statuses]
        self.stop()
        parts = [] if what is None else [what]
        for name in processes:
            end = "was running" if name in running else _describe(self._statuses[name])
            lines = "".join(f"\n    {line}" for line in list(self._children[name].tail)) or " none"
            parts.append(f"{name} {end}; last lines:{lines}")
        if running:
            parts.append(f"stopped: {', '.join(running)}")
        raise EngineError("\n".join(parts))


def _describe(status: int) -> str:
    """An exit status in words.

    Example:
        >>> _describe(3), _describe(-9)
        ('ended with exit status 3', 'was killed by SIGKILL (out of memory, or by hand)')
    """
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (" (out of memory, or by hand)" if name == "SIGKILL" else "")
