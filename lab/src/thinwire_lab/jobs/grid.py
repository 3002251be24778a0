"""A grid of cells: each is measured once a round, and its result is in a file as soon as it is there.

A subclass of `Grid` names the cells, measures one, and adds sections to the file. A grid that was interrupted goes on
from its file: only the cells of which the file holds no good result are measured. Runs that measure no seconds can be
made in parallel: one in a process of its own comes to the same bits.
"""

from __future__ import annotations

import json
import signal
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from thinwire.errors import ConfigError, EngineError, ThinwireError
from thinwire_lab.jobs.results import Machine, Results, machine

C = TypeVar("C")
F = TypeVar("F", bound=msgspec.Struct)
Measured = Mapping[C, Sequence[F]]
"""The results of each cell, one for each round so far."""
Tell = Callable[[str], None]
OnCell = Callable[[int, int, C], None]
"""Takes a cell's number, how many there are, and the cell, before it is measured."""


class Grid(ABC, Generic[C, F]):
    """Cells, and how one is measured.

    Attributes:
        kinds: the classes of results.
        key_options: options that change what is measured and that no cell holds.
        rounds: how often the grid is measured.
    """

    kinds: ClassVar[Sequence[type[msgspec.Struct]]]
    key_options: ClassVar[Sequence[str]] = ()
    rounds: int = 1

    @abstractmethod
    def cells(self) -> Sequence[C]:
        """Returns the grid: frozen dataclasses that hold everything that tells one measurement from another."""

    @abstractmethod
    def measure(self, cell: C, before: Measured[C, F], tell: Tell) -> F:
        """Measures one cell, given what was measured before; `tell` takes words on progress."""

    def failed(self, figures: F) -> bool:
        """Returns whether a measurement failed; a failed one is repeated when the grid goes on."""
        return False

    def outdated(self, cell: C, figures: F, before: Measured[C, F]) -> bool:
        """Returns whether a stored result has to be measured again, given the results of the cells before it."""
        return self.failed(figures)

    def lost(self, cell: C, error: EngineError) -> None:
        """Takes the error of a measurement that came to nothing; raises it where the grid is not to go on."""
        raise error

    def sections(self, measured: Measured[C, F]) -> dict[str, Any]:
        """Returns what the file holds beside the results."""
        return {}

    def key(self, cell: C, number: int) -> dict[str, Any]:
        """Returns the key of a cell's result in one round, as it comes back from the file."""
        options = {name: getattr(self, name) for name in self.key_options}
        key: dict[str, Any] = json.loads(json.dumps({**msgspec.to_builtins(cell), **options, "round": number}))
        return key


def run(
    grid: Grid[C, F],
    results: Results[Any],
    measured: dict[C, list[F]],
    *,
    on_cell: OnCell[C] = lambda number, total, cell: None,
    on_result: Callable[[C, F], None] = lambda cell, figures: None,
    tell: Tell = lambda text: None,
) -> None:
    """Measures the cells that `results` does not hold yet; `measured` has every result, also when it is interrupted."""
    cells = list(dict.fromkeys(grid.cells()))  # a cell that is named twice is measured once
    if not cells:
        raise ConfigError("there is nothing to measure: a list of names is empty")
    for number in range(len(cells) * grid.rounds):
        cell = cells[number % len(cells)]
        key = grid.key(cell, number // len(cells))
        figures = results.find(key)
        if new := figures is None or grid.outdated(cell, figures, measured):
            on_cell(number + 1, len(cells) * grid.rounds, cell)
            try:
                figures = grid.measure(cell, measured, tell)
            except EngineError as error:
                grid.lost(cell, error)
            else:
                results.add(key, figures)
                on_result(cell, figures)
        if figures is not None:
            measured.setdefault(cell, []).append(figures)
        if new or number + 1 == len(cells) * grid.rounds:
            results.save(grid.sections(measured))


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
    grid: Grid[P, F],
    results: Results[Any],
    chosen: Callable[[P], bool],
    jobs: int,
    *,
    on_cell: OnCell[P],
    on_progress: Callable[[P, float, str], None],
) -> None:
    """Makes those of the chosen cells that `results` lacks, in so many processes; EngineError where one fails.

    `on_progress` takes the share of a cell's run that is done, and a word; 1 and no word at its end.
    """
    cells = list(dict.fromkeys(grid.cells()))

    def lacks(cell: P) -> bool:
        figures = results.find(grid.key(cell, 0))
        return figures is None or grid.outdated(cell, figures, {})

    waiting = deque((number, cell) for number, cell in enumerate(cells, 1) if chosen(cell) and lacks(cell))
    context = get_context("spawn")  # a fork of a process with torch's threads may hang
    processes, busy = list[BaseProcess](), dict[Connection, tuple[BaseProcess, P]]()

    def give(connection: Connection, process: BaseProcess) -> None:
        if waiting:
            number, cell = waiting.popleft()
            on_cell(number, len(cells), cell)
            busy[connection] = process, cell
            connection.send(cell)
        else:
            busy.pop(connection, None)
            connection.close()  # which ends the process

    try:
        for _ in range(min(jobs, len(waiting))):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_serve, args=(theirs,), daemon=True))
            processes[-1].start()
            theirs.close()
            give(ours, processes[-1])
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
                        if lacks(cell):  # an equal cell may have stored what serves both
                            results.add(grid.key(cell, 0), message.outcome, message.machine)
                        results.save(grid.sections({}))
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
