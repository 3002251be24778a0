"""Makes the runs of a reproduction that are missing, one by one or several beside each other.

A run whose finding holds seconds is made alone, whatever was asked for: another one beside it would be measured along.
The others come to the same bits in a process of their own as in this one.
"""

from __future__ import annotations

import signal
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from thinwire.errors import EngineError, ThinwireError
from thinwire.jobs.results import Machine, Results, machine
from thinwire.studies.reproduce.entry import Cell, Finding, OnProgress, Study

OnCell = Callable[[int, int, Cell], None]
"""Called before each run with its number, how many are asked for, and its cell."""
OnCellProgress = Callable[[Cell, float, str], None]
"""Called during a run with its cell and what `OnProgress` takes, and with 1 and no word when it is over."""


@dataclass(frozen=True)
class _Missing:
    number: int
    cell: Cell
    run: Callable[[Any, OnProgress], Finding]


@dataclass(frozen=True)
class _Made:
    finding: Finding
    machine: Machine


def make(
    needed: Mapping[Cell, Study[Any, Any]],
    results: Results[Finding],
    *,
    jobs: int,
    on_cell: OnCell,
    on_progress: OnCellProgress,
) -> None:
    """Makes every run that the results lack, and stores it as soon as it is there.

    Args:
        needed: all cells, and who runs them.
        results: where findings are, and go.
        jobs: how many runs without seconds are made beside each other, each in a process of its own.
        on_cell, on_progress: told what happens.

    Raises:
        EngineError: a run failed or its process was ended; those before it are stored.
    """
    missing = [
        _Missing(number, cell, study.run)
        for number, (cell, study) in enumerate(needed.items(), 1)
        if results.find(cell.key()) is None
    ]
    beside = [each for each in missing if not each.cell.timed] if jobs > 1 else []
    if len(beside) > 1:
        _make_beside(beside, results, min(jobs, len(beside)), len(needed), on_cell, on_progress)
        missing = [each for each in missing if each.cell.timed]
    for each in missing:
        on_cell(each.number, len(needed), each.cell)
        finding = each.run(each.cell, lambda share, text, cell=each.cell: on_progress(cell, share, text))  # type: ignore[misc]  # mypy sees no default of a lambda
        results.add(each.cell.key(), finding)
        results.save({})
        on_progress(each.cell, 1.0, "")


def _make_beside(
    missing: Sequence[_Missing],
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
            each = waiting.popleft()
            on_cell(each.number, total, each.cell)
            busy[connection] = process, each.cell
            connection.send((each.run, each.cell))
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
                        results.add(cell.key(), message.finding, message.machine)
                        results.save({})
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
            run, cell = connection.recv()
        except EOFError:
            return
        try:
            finding = run(cell, lambda share, text: connection.send((share, text)))
        except ThinwireError as error:
            connection.send(error)
        except Exception:
            connection.send(EngineError(f"{cell}: {traceback.format_exc()}"))
        else:
            connection.send(_Made(finding, machine()))
