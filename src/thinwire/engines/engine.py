"""An engine starts roles by name, reads their events, and restarts roles that fail.

A role is a process or actor that an engine starts under a name, usually a server or a worker. The lab's `local` engine
starts processes on this machine, `ray` actors on a cluster. The first failure of a role without restarts ends the run:
the engine stops all roles and raises an EngineError.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Generic, NoReturn, Self, TypeVar

from thinwire.engines.events import Event, Lost, Restarted
from thinwire.errors import ConfigError, EngineError

TAIL_LINES = 20  # of a role's output, kept for the error message
_SETTLE_S = 0.5  # after a failure: the error also names roles that fail within it

# Workers that share a machine slow each other down several times when each uses every core. Unbuffered, so that the
# engine reads a report at once.
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
}

E = TypeVar("E", bound=Event)
Command = Sequence[str] | Callable[[], object]
"""A program and its arguments; or a call, for an engine that runs a role in a process of its own."""
Again = Callable[[], Command | None]
"""Returns the command of a later start; None where there is none yet."""


class Role:
    """An engine's state of one role; arguments as for `Engine.start`."""

    def __init__(self, name: str, again: Again, restarts: int, optional: bool) -> None:
        self.name, self.again, self.restarts, self.optional = name, again, restarts, optional
        self.status: int | None = None  # once the engine has read its end
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)


R = TypeVar("R", bound=Role)


class Engine(ABC, Generic[R]):
    """The roles of one run. The methods are for one thread at a time."""

    def __init__(self) -> None:
        self._roles: dict[str, R] = {}
        self._unread: deque[tuple[str, Event]] = deque()  # arrived while wait_for waited for another

    @property
    @abstractmethod
    def pids(self) -> Mapping[str, int]:
        """The process ids of all roles, by name; waits until each has one."""

    @property
    def running(self) -> set[str]:
        """The roles whose end the engine has not read."""
        return {name for name, role in self._roles.items() if role.status is None}

    @abstractmethod
    def listen_at(self, host: str) -> str:
        """Returns the address at which a server on `host` is to listen, `host:port`; port 0 takes a free one."""

    @abstractmethod
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
        """Starts a role.

        Args:
            name: its name in events and errors; free again when it has ended.
            command: the program or call.
            host: one of the engine's hosts; None for an engine without hosts.
            restarts: how many failures are followed by a restart; a further one ends the run.
            again: returns the command of a restart, or None where it is impossible; by default the same command.
            optional: its last failure does not end the run.

        Raises:
            ConfigError: a name that is in use, or a host that cannot be.
            EngineError: it could not be started.
        """

    @abstractmethod
    def stop(self) -> None:
        """Asks every role to end, waits a moment for all, kills the rest. May be called again."""

    @abstractmethod
    def receive(self, timeout_s: float | None) -> tuple[str, Event | int] | None:
        """Returns the next event or a role's exit status, which it notes; None at the timeout.

        `events` and `wait_for` restart a failed role, or raise.
        """

    @abstractmethod
    def _start_again(self, role: R, command: Command) -> None:
        """Restarts a failed role and uses one of its restarts."""

    def wait_for(self, name: str, kind: type[E], timeout_s: float) -> E:
        """Waits until a role reports an event of one kind, such as a server's address; keeps all other events.

        Raises:
            ConfigError: no such role.
            EngineError: it ended first, another failed, or the time was over; everything has been stopped.
        """
        if name not in self._roles:
            raise ConfigError(f"no process called {name}; there are {list(self._roles)}")
        deadline = time.monotonic() + timeout_s
        later: list[tuple[str, Event]] = []
        try:
            while self._unread or self._roles[name].status is None:
                came = self._next(max(0.0, deadline - time.monotonic()))
                if came is None:
                    self._fail(f"{name} did not report {kind.__name__} within {timeout_s:g} s", [name])
                whose, event = came
                if whose == name and isinstance(event, kind):
                    return event
                if isinstance(event, Event):
                    later.append((whose, event))
            self._fail(f"{name} ended before it reported {kind.__name__}", [name])
        finally:
            self._unread.extendleft(reversed(later))

    def events(self, *, silence_s: float | None = None, besides: Collection[str] = ()) -> Iterator[tuple[str, Event]]:
        """Yields the events of all roles, each with its role, until all have ended well.

        Args:
            silence_s: seconds without an event after which the run counts as stuck; None: no limit.
            besides: roles that need not end; read again before every wait.

        Raises:
            EngineError: a role failed, or all were silent too long; everything has been stopped.
        """
        while self._unread or self.running.difference(besides):
            came = self._next(silence_s)
            if came is None:
                self._fail(f"no process has reported anything for {silence_s:g} s", sorted(self._roles))
            if isinstance(came[1], Event):
                yield came[0], came[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _next(self, timeout_s: float | None) -> tuple[str, Event | int] | None:
        """Returns as `receive`; starts a failed role again, or raises EngineError."""
        if self._unread:
            return self._unread.popleft()
        came = self.receive(timeout_s)
        if came is not None and isinstance(came[1], int) and came[1] != 0:
            role = self._roles[came[0]]
            end = _describe(role.status)
            if role.restarts and (command := role.again()) is not None:
                left = role.restarts - 1
                self._start_again(role, command)
                return came[0], Restarted(reason=end, left=left)
            if role.optional:
                return came[0], Lost(reason=_end_of(role, end))
            # The engine may read the ends of peers before that of the role that failed first: name them all.
            deadline = time.monotonic() + _SETTLE_S
            while (left_s := deadline - time.monotonic()) > 0 and self.receive(left_s) is not None:
                pass
            failed = [name for name, role in self._roles.items() if role.status and not role.optional]
            self._fail(None, sorted(failed, key=lambda name: name != came[0]))
        return came

    def _fail(self, what: str | None, names: Collection[str]) -> NoReturn:
        """Stops everything and raises, with the end and the last lines of each of these roles."""
        running = [name for name, role in self._roles.items() if role.status is None]
        ends = {name: _describe(self._roles[name].status) for name in names}
        self.stop()
        parts = [] if what is None else [what]
        parts += [f"{name} {_end_of(self._roles[name], end)}" for name, end in ends.items()]
        if running:
            parts.append(f"stopped: {', '.join(running)}")
        raise EngineError("\n".join(parts))


def _end_of(role: Role, end: str) -> str:
    lines = "".join(f"\n    {line}" for line in list(role.tail)) or " none"
    return f"{end}; last lines:{lines}"


def _describe(status: int | None) -> str:
    """Returns the text for an exit status.

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
