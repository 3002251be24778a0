"""Start a server and its workers on this machine, hear what they report, and leave nothing behind.

Each process runs a command that the caller gives, tied to the launcher's life (`parent_watch`), in a session of its
own (so that Ctrl-C reaches only the launcher), and behind its own thin link where there is a `Fabric`.
Processes report in JSON objects, one a line, on standard output; everything else they print is kept, and shown
when one fails. The first to fail ends the run: the others are stopped and an EngineError says who and why.

The engine knows nothing of training: neither what the commands do nor what their events mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, NoReturn

from thinwire.engines.namespaces import Fabric
from thinwire.engines.parent_watch import with_parent_watch
from thinwire.errors import ConfigError, EngineError

TAIL_LINES = 20  # of each process's output, kept for the error message
_SETTLE_S = 0.5  # after a failure: how long others may take to fail of the same cause, to be named too
_DRAIN_S = 2.0  # after an end: how long its streams may stay open in somebody else's hands


@dataclass(frozen=True, slots=True)
class Event:
    """What one process reported: a JSON object, by convention with a key "event" that names its kind."""

    process: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Ended:
    """A process is gone, and all that it wrote has been read."""

    process: str
    status: int


def thread_limits(num_threads: int) -> dict[str, str]:
    """The environment that keeps a child's arithmetic libraries to `num_threads` threads each.

    Workers that share a machine slow each other down several times over when each takes every core.

    Raises:
        ConfigError: fewer than one thread.

    Example:
        >>> thread_limits(1)["OMP_NUM_THREADS"]
        '1'
    """
    if num_threads < 1:
        raise ConfigError(f"{num_threads} threads for each process; expected 1 or more")
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(num_threads))


class LocalEngine:
    """The processes of one run.

    Start processes from a thread that lives until `stop` (the main one, as a rule): a child is tied to the
    thread that started it. The methods are for one thread at a time.

    Args:
        fabric: the thin links to put processes on, or None to use the machine's own network.
        num_threads: threads for each process's arithmetic libraries; None leaves the choice to them.
        environment: variables to set for each process on top of what it inherits.
        grace_s: how long `stop` waits between asking and killing.

    Example:
        >>> import sys
        >>> report = 'import json; print(json.dumps({"event": "sum", "value": 1 + 1}))'
        >>> with LocalEngine() as engine:
        ...     engine.start("worker 0", [sys.executable, "-c", report])
        ...     [event.data["value"] for event in engine.events()]
        [2]
    """

    def __init__(
        self,
        *,
        fabric: Fabric | None = None,
        num_threads: int | None = 1,
        environment: Mapping[str, str] | None = None,
        grace_s: float = 5.0,
    ) -> None:
        self._fabric = fabric
        # Unbuffered, so that what a process reports is heard when it happens.
        self._environment = {"PYTHONUNBUFFERED": "1"}
        if num_threads is not None:
            self._environment |= thread_limits(num_threads)
        self._environment |= environment or {}
        self._grace_s = grace_s
        self._children: dict[str, _Child] = {}
        self._inbox: queue.SimpleQueue[Event | _Ended] = queue.SimpleQueue()
        self._unread: deque[Event] = deque()  # came while wait_for was waiting for another
        self._statuses: dict[str, int] = {}

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of everything started, by name."""
        return {name: child.process.pid for name, child in self._children.items()}

    def start(self, name: str, argv: Sequence[str], *, host: str | None = None) -> None:
        """Start a process.

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
            self._children[name] = _Child(name, command, self._inbox)
        except OSError as error:
            raise EngineError(f"{name} could not be started: {error}") from error

    def wait_for(self, process: str, event: str, timeout_s: float) -> Event:
        """Wait until a process reports an event, such as a server its address. Other events are kept.

        Raises:
            ConfigError: no such process.
            EngineError: it ended first, another failed, or the time was over; everything has been stopped.
        """
        self._check_known({process})
        deadline = time.monotonic() + timeout_s
        others: list[Event] = []
        try:
            while self._unread or process not in self._statuses:
                came = self._next(max(0.0, deadline - time.monotonic()))
                if came is None:
                    self._fail(f"{process} did not report {event!r} within {timeout_s:g} s", {process})
                if isinstance(came, Event):
                    if came.process == process and came.data.get("event") == event:
                        return came
                    others.append(came)
            self._fail(f"{process} ended before it reported {event!r}", {process})
        finally:
            self._unread.extendleft(reversed(others))

    def events(self, until: Collection[str] | None = None, *, silence_s: float | None = None) -> Iterator[Event]:
        """Yield what the processes report, in the order it comes, until some of them have ended well.

        Args:
            until: the processes whose end (with status 0) ends the run; every process if not given.
            silence_s: how long all may be silent before the run counts as stuck; None is for ever.

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
            if isinstance(came, Event):
                yield came

    def stop(self) -> None:
        """Ask every process to end (SIGTERM), wait `grace_s` for all, kill the rest. May be called again."""
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

    def _next(self, timeout_s: float | None) -> Event | _Ended | None:
        """What came next, or None if nothing did in time. Raises EngineError if it is a failure."""
        if self._unread:
            return self._unread.popleft()
        try:
            came = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(came, _Ended):
            self._statuses[came.process] = came.status
            if came.status != 0:
                self._fail(None, self._failed_together(came))
        return came

    def _failed_together(self, first: _Ended) -> list[str]:
        """The processes that failed with the first: when one dies, its peers may be heard of before it is."""
        failed = [first.process]
        deadline = time.monotonic() + _SETTLE_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                came = self._inbox.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(came, _Ended):
                self._statuses[came.process] = came.status
                if came.status != 0:
                    failed.append(came.process)
        return failed

    def _fail(self, what: str | None, processes: Collection[str]) -> NoReturn:
        """Stop everything and raise, saying how each of these ended and the last lines that it wrote."""
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


class _Child:
    """One process, and the threads that read what it writes and notice its end."""

    def __init__(self, name: str, command: Sequence[str], inbox: queue.SimpleQueue[Event | _Ended]) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._inbox = inbox
        self.process = subprocess.Popen(
            with_parent_watch(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._watcher = threading.Thread(target=self._watch, name=f"watch {name}", daemon=True)
        self._watcher.start()

    def signal(self, signum: int) -> None:
        """Send a signal to the process and to whatever it has started; nothing if it has ended."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signum)

    def join(self, timeout_s: float | None) -> None:
        """Wait until the process has ended and everything that it wrote has been read."""
        self._watcher.join(timeout_s)

    def _watch(self) -> None:
        readers = [
            threading.Thread(target=self._read, args=(stream, reports), daemon=True)
            for stream, reports in ((self.process.stdout, True), (self.process.stderr, False))
        ]
        for reader in readers:
            reader.start()
        status = self.process.wait()
        # Its own children (data loaders, say) would hold the streams open and outlive the run.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for reader in readers:
            reader.join(_DRAIN_S)
        self._inbox.put(_Ended(self.name, status))

    def _read(self, stream: IO[str], reports: bool) -> None:
        with stream:
            for line in stream:
                data = _parse(line) if reports else None
                if data is not None:
                    self._inbox.put(Event(self.name, data))
                elif line.strip():
                    self.tail.append(line.rstrip())


def _parse(line: str) -> dict[str, Any] | None:
    """The JSON object in a line, or None where it is something else that a library printed."""
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


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
