"""Virtual time: one heap of events, hosts that run, freeze and die, and processes that wait. One seed, one order.

A `Host` is a machine's process as the world sees it: what is to happen there happens unless it is frozen (then later)
or dead (then never). Its clock is its own and may jump. A `Process` is a generator that yields `Wait`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from thinwire.runtime.clock import Cancel

MAX_EVENTS = 20_000
"""A run takes some hundreds; more means that a process goes round in circles."""

RESOLUTION_S = 1e-6
"""No process waits for a shorter time."""


class Circling(AssertionError):
    """A run takes more events than any run may."""


class Killed(BaseException):
    """A process is gone, in the middle of whatever it did."""


class Scheduler:
    """The events of one run, at virtual times."""

    def __init__(self, *, trace: bool = False) -> None:
        self.now, self.events = 0.0, 0
        self.trace: list[str] | None = [] if trace else None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, time: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (max(time, self.now), self._number, call))

    def after(self, delay: float, call: Callable[[], None]) -> None:
        self.at(self.now + delay, call)

    def step(self) -> bool:
        """Lets the next event happen; False where there is none."""
        if not self._heap:
            return False
        self.now, _, call = heapq.heappop(self._heap)
        self.events += 1
        if self.events > MAX_EVENTS:
            raise Circling(f"{MAX_EVENTS} events, and no end")
        with suppress(Killed):
            call()
        return True

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:9.4f}  {text}")


@dataclass(eq=False)
class _Timer:
    due: float
    call: Callable[[], None]
    over: bool = False

    def cancel(self) -> None:
        self.over = True


@dataclass(eq=False)
class Host:
    """One process of the operating system. It is a `Clock` to the code that runs there."""

    scheduler: Scheduler
    name: str
    alive: bool = True
    frozen: bool = False
    _ahead: float = 0.0
    _backlog: list[Callable[[], None]] = field(default_factory=list)
    _timers: list[_Timer] = field(default_factory=list)

    def now(self) -> float:
        """The time as this host's clock has it."""
        return self.scheduler.now + self._ahead

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Cancel:
        """As `Clock.call_later`, by this host's clock."""
        timer = _Timer(self.now() + delay_s, callback)
        self._timers = [each for each in self._timers if not each.over]
        self._timers.append(timer)
        self._arm(timer)
        return timer.cancel

    def jump(self, seconds: float) -> None:
        """The clock goes ahead, as after a suspended machine wakes up: what is due by it, is due."""
        self._ahead += seconds
        for timer in self._timers:
            self._arm(timer)

    def deliver(self, call: Callable[[], None]) -> None:
        """Something happens at this host: now, or once it is no longer frozen."""
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append(call)
        else:
            call()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for call in backlog:
            self.deliver(call)

    def die(self) -> None:
        self.alive = False
        self._backlog.clear()
        self._timers.clear()

    def _arm(self, timer: _Timer) -> None:
        self.scheduler.at(timer.due - self._ahead, lambda: self.deliver(lambda: self._fire(timer)))

    def _fire(self, timer: _Timer) -> None:
        if timer.over or self.now() < timer.due - 1e-9:
            return
        timer.over = True
        timer.call()


@dataclass(frozen=True, slots=True)
class Wait:
    """Until something comes, or the time is over."""

    seconds: float | None = None
    deaf: bool = False


Body: TypeAlias = Generator[Wait, None, None]
"""What a process does."""


class Process:
    """A generator that runs on a host until it waits."""

    def __init__(self, host: Host, body: Body, on_end: Callable[[Exception | None], None]) -> None:
        self._host, self._body, self._on_end = host, body, on_end
        self._waiting: Wait | None = None
        self._turn = 0
        self._running = False
        self.over = False

    def start(self) -> None:
        self._waiting = Wait()
        self.wake()

    def wake(self) -> None:
        """Something came: it looks whether that is what it waits for."""
        if self._waiting is not None and not self._waiting.deaf:
            self._resume(self._turn)

    def kill(self) -> None:
        self.over, self._waiting = True, None
        self._host.die()
        if not self._running:
            self._body.close()

    def _resume(self, turn: int) -> None:
        if self.over or turn != self._turn or self._waiting is None:
            return
        self._turn += 1
        self._waiting = None
        self._running = True
        try:
            wait = next(self._body)
        except StopIteration:
            self._end(None)
        except Killed:
            pass
        except AssertionError:
            raise
        except Exception as error:
            self._end(error)
        else:
            self._waiting, turn = wait, self._turn
            if wait.seconds is not None:
                # What is left of a wait may be less than two floats differ by: the time would stand still.
                self._host.call_later(max(wait.seconds, RESOLUTION_S), lambda: self._resume(turn))
        finally:
            self._running = False

    def _end(self, error: Exception | None) -> None:
        if not self.over:
            self.over = True
            self._host.die()
            self._on_end(error)
