"""What an engine is: it starts roles by name, reads the events that they report, and starts again those that fail.

A role is a process or actor that an engine starts under a name, a server or a worker as a rule. Engines differ in how a
role is started and heard of: `local` has processes of this machine, `ray` actors of a cluster. What follows from an end
is here: the first role to fail for good ends the run; the engine stops all roles and raises an EngineError.
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
_SETTLE_S = 0.5  # after a failure: other roles that fail of the same cause within it are named too

# Workers that share a machine slow each other down several times over when each takes every core. Unbuffered, so that
# a report is read when it happens.
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
    """What an engine keeps of one role; arguments as for `Engine.start`."""

    def __init__(self, name: str, again: Again, restarts: int, optional: bool) -> None:
        self.name, self.again, self.restarts, self.optional = name, again, restarts, optional
        self.status: int | None = None  # once the engine has read its end
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)


R = TypeVar("R", bound=Role)


class Engine(ABC, Generic[R]):
    """The roles of one run. The methods are for one thread at a time."""

    def __init__(self) -> None:
        self._roles: dict[str, R] = {}
        self._unread: deque[tuple[str, Event]] = deque()  # came while wait_for was waiting for another

    @property
    @abstractmethod
    def pids(self) -> Mapping[str, int]:
        """The process ids of all roles, by name; waits until each has one."""

    @property
    def running(self) -> set[str]:
        """The roles that are not known to have ended."""
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
            name: what to call it in events and errors; taken again only where it has ended.
            command: what to run.
            host: where, among the hosts that the engine was given; None where it was given none.
            restarts: how often it is started again where it fails, before that ends the run.
            again: returns the command of a later start, or None where there can be none; by default the same command.
            optional: the run goes on where it fails for good.

        Raises:
            ConfigError: a name that is in use, or a host that cannot be.
            EngineError: it could not be started.
        """

    @abstractmethod
    def stop(self) -> None:
        """Asks every role to end, waits a moment for all, kills the rest. May be called again."""

    @abstractmethod
    def receive(self, timeout_s: float | None) -> tuple[str, Event | int] | None:
        """Returns the next event, or a role's exit status, which is noted; None if nothing comes in time.

        Nothing follows from an end here: `poll`, `events` and `wait_for` start a failed role again, or raise.
        """

    @abstractmethod
    def _start_again(self, role: R, command: Command) -> None:
        """Starts a role that failed again, which takes one of its restarts."""

    def wait_for(self, name: str, kind: type[E], timeout_s: float) -> E:
        """Waits until a role reports an event of one kind, such as a server its address; keeps all other events.

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
            silence_s: how long all may be silent before the run counts as stuck, in seconds; None is for ever.
            besides: roles that are not waited for; looked at again before every wait.

        Raises:
            EngineError: a role failed, or all were silent too long; everything has been stopped.
        """
        while self._unread or self.running.difference(besides):
            came = self._next(silence_s)
            if came is None:
                self._fail(f"no process has reported anything for {silence_s:g} s", sorted(self._roles))
            if isinstance(came[1], Event):
                yield came[0], came[1]

    def poll(self, timeout_s: float) -> tuple[str, Event] | None:
        """Returns the next event with its role; None where none comes in time, or a role ended well meanwhile.

        Raises:
            EngineError: a role failed that is not optional; everything has been stopped.
        """
        name, came = self._next(timeout_s) or ("", None)
        return (name, came) if isinstance(came, Event) else None

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
            # When one dies, its peers may be heard of before it is: the first to be heard of is not named alone.
            deadline = time.monotonic() + _SETTLE_S
            while (left_s := deadline - time.monotonic()) > 0 and self.receive(left_s) is not None:
                pass
            failed = [name for name, role in self._roles.items() if role.status and not role.optional]
            self._fail(None, sorted(failed, key=lambda name: name != came[0]))
        return came

    def _fail(self, what: str | None, names: Collection[str]) -> NoReturn:
        """Stops everything and raises, saying how each of these ended and the last lines that it wrote."""
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
    """Returns an exit status in words.

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
