"""Who runs the slices of one large tensor side by side: an interface, and who has it. Knows no threads itself.

Codecs and kernels cut a tensor into slices and hand over one task for each; they must not start threads. The package
provides `thinwire.runtime.threads` when it is imported; without it tasks run one after another, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

Task = Callable[[], object]


class Executor(Protocol):
    """Runs tasks that do not depend on each other."""

    @property
    def width(self) -> int:
        """How many tasks run at once: one for each core that the process may use."""

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


_provided: Executor = InTurn()


def provide(executor: Executor) -> None:
    """Makes `executor` the one that codecs use from now on, in the whole process."""
    global _provided
    _provided = executor


def current() -> Executor:
    """Returns the executor that codecs use."""
    return _provided
