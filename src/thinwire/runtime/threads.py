"""The threads that share one large tensor: a pool that is made when it is first needed, one for each process.

Tasks are slices in compiled kernels, which release the interpreter lock. They never wait for one another, so callers in
several threads may share the pool. A forked child has none of its parent's threads and makes a pool of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.executor import Task

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


class Threads:
    """An `Executor`: the caller's thread takes the first task, the pool the others.

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
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(max(1, self.width - 1), thread_name_prefix="thinwire-slice")
            self._process = os.getpid()
        return self._pool
