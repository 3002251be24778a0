"""Makes the runs of a reproduction that are missing, one by one or several beside each other.

A run whose finding holds seconds is made alone, whatever was asked for: another one beside it would be measured along.
The others come to the same bits in a process of their own as in this one.
"""

from __future__ import annotations

import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from thinwire.errors import EngineError, ThinwireError
from thinwire_lab.jobs.results import Machine, Results, machine
from thinwire_lab.studies.reproduce.entry import Cell, Finding

OnCell = Callable[[int, int, Cell], None]
"""Called before each run with its number, how many are asked for, and its cell."""
OnCellProgress = Callable[[Cell, float, str], None]
"""Called during a run with its cell and what `OnProgress` takes, and with 1 and no word when it is over."""


@dataclass(frozen=True)
class _Made:
    finding: Finding
    machine: Machine


def found(results: Results[Finding], cell: Cell) -> Finding | None:
    """Returns what a cell came to, or None where no run of it is stored.

    Cells of two classes may have equal settings where what one comes to is more than the other's; the one that comes to
    more is not made by a run of the other.
    """
    finding = results.find(cell.key())
    return finding if isinstance(finding, cell.finding) else None


def make(
    needed: Sequence[Cell],
    results: Results[Finding],
    *,
    jobs: int,
    on_cell: OnCell,
    on_progress: OnCellProgress,
) -> None:
    """Makes every run that the results lack, and stores it as soon as it is there.

    Args:
        needed: all cells.
        results: where findings are, and go.
        jobs: how many runs without seconds are made beside each other, each in a process of its own.
        on_cell, on_progress: told what happens.

    Raises:
        EngineError: a run failed or its process was ended; those before it are stored.
    """
    missing = [(number, cell) for number, cell in enumerate(needed, 1) if found(results, cell) is None]
    beside = [(number, cell) for number, cell in missing if not cell.timed] if jobs > 1 else []
    if len(beside) > 1:
        _make_beside(beside, results, min(jobs, len(beside)), len(needed), on_cell, on_progress)
        missing = [(number, cell) for number, cell in missing if cell.timed]
    for number, cell in missing:
        on_cell(number, len(needed), cell)
        _keep(results, cell, cell.run(partial(on_progress, cell)))
        on_progress(cell, 1.0, "")


def _keep(results: Results[Finding], cell: Cell, finding: Finding, on: Machine | None = None) -> None:
    if found(results, cell) is None:  # what a cell of equal settings came to meanwhile, and is more, stays
        results.add(cell.key(), finding, on)
    results.save({})


def _make_beside(
    missing: Sequence[tuple[int, Cell]],
    results: Results[Finding],
    jobs: int,
    total: int,
    on_cell: OnCell,
    on_progress: OnCellProgress,
) -> None:
    context = get_context("spawn")  # a fork of a process with torch's threads may hang
    waiting, busy = deque(missing), dict[Connection, tuple[BaseProcess, Cell]]()

    def give(connection: Connection, process: BaseProcess) -> None:
        if waiting:
            number, cell = waiting.popleft()
            on_cell(number, total, cell)
            busy[connection] = process, cell
            connection.send(cell)
        else:
            busy.pop(connection, None)
            connection.close()  # which ends it

    processes = list[BaseProcess]()
    try:
        for _ in range(jobs):
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
                        _keep(results, cell, message.finding, message.machine)
                        on_progress(cell, 1.0, "")
                        give(each, process)
                    case BaseException():
                        raise message
                    case (share, text):
                        on_progress(cell, share, text)
    finally:
        for process in processes:
            process.kill()  # it has nothing to do any more, or nobody to tell
            process.join()


def _serve(connection: Connection) -> None:
    """Makes the runs that come, in a process of its own, until no more can come."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the one that started this ends it
    while True:
        try:
            cell: Cell = connection.recv()
        except EOFError:
            return
        try:
            finding = cell.run(lambda share, text: connection.send((share, text)))
        except ThinwireError as error:
            connection.send(error)
        except Exception:
            connection.send(EngineError(f"{cell}: {traceback.format_exc()}"))
        else:
            connection.send(_Made(finding, machine()))
