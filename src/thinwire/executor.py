"""Who runs the slices of one large tensor side by side: an interface, and two that have it.

Codecs and kernels cut a tensor into slices and hand over one task for each; they start no threads. An executor comes
with the memory that they work in (`thinwire.codecs.tensors`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

Task = Callable[[], object]


class Executor(Protocol):
    """Runs tasks that do not depend on each other."""

    @property
    def width(self) -> int:
        """How many tasks run at once."""

    def run(self, tasks: Sequence[Task]) -> None:
        """Runs all tasks and returns when the last has ended; raises what the first of them raised."""


class InTurn:
    """Runs tasks one after another in the caller's thread.

    Example:
        >>> seen = []
        >>> InTurn().run([lambda: seen.append(1), lambda: seen.append(2)])
        >>> seen
        [1, 2]
    """

    width = 1

    def run(self, tasks: Sequence[Task]) -> None:
        """Runs the tasks."""
        for task in tasks:
            task()


class Threads:
    """Runs the first task in the caller's thread and the others in a pool, which is made when it is first needed.

    Tasks are slices in compiled kernels, which release the interpreter lock. They never wait for one another, so
    callers in several threads may share the pool. A forked child has none of its parent's threads and makes its own.

    Example:
        >>> seen = []
        >>> Threads().run([lambda: seen.append(1), lambda: seen.append(2)])
        >>> sorted(seen)
        [1, 2]
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    @property
    def width(self) -> int:
        """The cores that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def run(self, tasks: Sequence[Task]) -> None:
        """Runs all tasks; the first failure in their order is raised when all have ended."""
        if not tasks:
            return
        others = [self._threads().submit(task) for task in tasks[1:]]
        try:
            tasks[0]()
        finally:
            failures = [other.exception() for other in others]
        for failure in failures:
            if failure is not None:
                raise failure

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():
            from concurrent.futures import ThreadPoolExecutor  # a tenth of a second that most processes never need

            self._pool = ThreadPoolExecutor(max(1, self.width - 1), thread_name_prefix="thinwire-slice")
            self._process = os.getpid()
        return self._pool
