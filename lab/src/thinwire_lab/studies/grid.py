"""The runner of `compare` and `reproduce`: makes the runs that a file of results lacks, one by one or in parallel.

A run in a process of its own comes to the same bits as one here. A run that measures seconds needs the machine alone:
leave it to `Grid.make`.
"""

from __future__ import annotations

import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from thinwire.errors import EngineError, ThinwireError
from thinwire_lab.jobs.results import Machine, Results, machine

C = TypeVar("C")
R = TypeVar("R", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Grid(Generic[C, R]):
    """The runs that a study needs, and the results that keep them.

    Args:
        needed: the cell of each run.
        results: take each run as soon as it is made.
        key: returns the job under which a cell's run is stored.
        made: whether the results hold a cell's run.
        on_cell: called before each run with its number, the number of all runs, and its cell.
        save: writes the results.
    """

    needed: Sequence[C]
    results: Results[R]
    key: Callable[[C], Mapping[str, Any]]
    made: Callable[[C], bool]
    on_cell: Callable[[int, int, C], None]
    save: Callable[[], object]

    def missing(self) -> Iterator[tuple[int, C]]:
        """Returns the cells without a run, with their numbers."""
        return ((number, cell) for number, cell in enumerate(self.needed, 1) if not self.made(cell))

    def make(self, run: Callable[[C], R], on_failure: Callable[[C, EngineError], None] | None = None) -> None:
        """Makes the missing runs in this process.

        Args:
            run: makes one run.
            on_failure: takes the error of a run that failed; None raises it.
        """
        for number, cell in self.missing():
            self.on_cell(number, len(self.needed), cell)
            try:
                outcome = run(cell)
            except EngineError as error:
                if on_failure is None:
                    raise
                on_failure(cell, error)
                self.save()
            else:
                self.store(cell, outcome)

    def store(self, cell: C, outcome: R, on: Machine | None = None) -> None:
        """Stores an outcome, unless another cell with the same key has stored one that serves both."""
        if not self.made(cell):
            self.results.add(self.key(cell), outcome, on)
        self.save()


class Runnable(Protocol):
    """A cell that makes its own run; another process gets it pickled."""

    def run(self, on_progress: Callable[[float, str], None]) -> Any:
        """Makes the run."""


P = TypeVar("P", bound=Runnable)


@dataclass(frozen=True)
class _Made:
    outcome: Any
    machine: Machine


def make_parallel(
    grid: Grid[P, R], missing: Sequence[tuple[int, P]], jobs: int, on_progress: Callable[[P, float, str], None]
) -> None:
    """Makes runs in `jobs` processes.

    Args:
        grid: takes the outcomes.
        missing: numbers and cells.
        jobs: the number of processes.
        on_progress: called with a cell, the share of its run that is done, and a word; with 1 and no word at its end.

    Raises:
        EngineError: a run failed or its process ended; the runs before it are stored.
    """
    context = get_context("spawn")  # a fork of a process with torch's threads may hang
    waiting, busy = deque(missing), dict[Connection, tuple[BaseProcess, P]]()

    def give(connection: Connection, process: BaseProcess) -> None:
        if waiting:
            number, cell = waiting.popleft()
            grid.on_cell(number, len(grid.needed), cell)
            busy[connection] = process, cell
            connection.send(cell)
        else:
            busy.pop(connection, None)
            connection.close()  # which ends the process

    processes = list[BaseProcess]()
    try:
        for _ in range(min(jobs, len(missing))):
            ours, theirs = context.Pipe()
            started = context.Process(target=_serve, args=(theirs,), daemon=True)
            started.start()
            theirs.close()
            processes.append(started)
            give(ours, started)
        while busy:
            for each in wait(list(busy)):
                assert isinstance(each, Connection)
                process, cell = busy[each]
                try:
                    message = each.recv()
                except EOFError:
                    process.join()
                    raise EngineError(f"{cell}: its process ended with status {process.exitcode}") from None
                match message:
                    case _Made():
                        grid.store(cell, message.outcome, message.machine)
                        on_progress(cell, 1.0, "")
                        give(each, process)
                    case BaseException():
                        raise message
                    case (share, text):
                        on_progress(cell, share, text)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(connection: Connection) -> None:
    """Makes the runs of the cells that come, until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    while True:
        try:
            cell: Runnable = connection.recv()
        except EOFError:
            return
        try:
            outcome = cell.run(lambda share, text: connection.send((share, text)))
        except ThinwireError as error:
            connection.send(error)
        except Exception:
            connection.send(EngineError(f"{cell}: {traceback.format_exc()}"))
        else:
            connection.send(_Made(outcome, machine()))
