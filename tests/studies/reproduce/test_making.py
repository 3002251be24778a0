"""Runs beside each other: the same findings, failures that say which, and nothing beside what is timed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.errors import EngineError
from thinwire.jobs.results import Results
from thinwire.studies.reproduce.entry import Cell, Finding, OnProgress, Scale, Shown, Study
from thinwire.studies.reproduce.making import make
from thinwire.studies.reproduce.trainings import TrainingCell, TrainingFinding, train


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own finds what runs by the name of this module."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3])


class Spot(Cell, frozen=True, kw_only=True):
    timed = False
    number: int

    def __str__(self) -> str:
        return f"spot {self.number}"


class Timed(Spot, frozen=True, kw_only=True):
    timed = True


class Where(Finding, frozen=True, kw_only=True):
    process: int


def where(cell: Spot, on_progress: OnProgress) -> Where:
    on_progress(0.5, "half")
    time.sleep(0.2)
    return Where(process=os.getpid())


def fail(cell: Spot, on_progress: OnProgress) -> Where:
    if cell.number == 2:
        raise ZeroDivisionError("two are too many")
    return Where(process=os.getpid())


def refuse(cell: Spot, on_progress: OnProgress) -> Where:
    raise EngineError(f"{cell} will not")


def end(cell: Spot, on_progress: OnProgress) -> Where:
    os.kill(os.getpid(), signal.SIGKILL)
    return Where(process=0)


def study(run: Callable[[Spot, OnProgress], Where]) -> Study[Spot, Where]:
    def cells(scale: Scale) -> list[Spot]:
        return []

    return Study(cells=cells, run=run, show=lambda found: Shown(setting=""), finding=Where)


def test_what_is_not_timed_runs_beside_and_the_rest_alone(tmp_path: Path) -> None:
    results, told = Results[Finding](tmp_path / "results.json", [Where]), list[tuple[int, int, str]]()
    of = study(where)
    cells: list[Cell] = [Timed(number=0), *(Spot(number=number) for number in range(1, 5)), Timed(number=5)]
    progress: dict[Cell, list[float]] = {cell: [] for cell in cells}
    make(
        dict.fromkeys(cells, of),
        results,
        jobs=2,
        on_cell=lambda number, total, cell: told.append((number, total, str(cell))),
        on_progress=lambda cell, share, text: progress[cell].append(share),
    )
    assert told == [(number + 1, 6, f"spot {number}") for number in (1, 2, 3, 4, 0, 5)]
    assert all(shares == [0.5, 1.0] for shares in progress.values())
    found = [results.find(cell.key()) for cell in cells]
    processes = [each.process for each in found if isinstance(each, Where)]
    assert processes[0] == processes[5] == os.getpid()
    assert len(set(processes)) == 3, "two beside each other, each with two runs"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (fail, "(?s)spot 2: Traceback.*two are too many"),
        (refuse, "^spot [01] will not$"),
        (end, "spot [01]: its process ended with status -9"),
    ],
)
def test_a_failure_says_which_and_keeps_what_was_made(
    run: Callable[[Spot, OnProgress], Where], message: str, tmp_path: Path
) -> None:
    results = Results[Finding](tmp_path / "results.json", [Where])
    cells: list[Cell] = [Spot(number=number) for number in range(3)]
    with pytest.raises(EngineError, match=message):
        make(
            dict.fromkeys(cells, study(run)),
            results,
            jobs=2,
            on_cell=lambda *_: None,
            on_progress=lambda *_: None,
        )
    kept = Results[Finding](tmp_path / "results.json", [Where]).runs
    assert len(kept) >= 1 if run is fail else not kept


def test_trainings_beside_each_other_come_to_the_same_bits(tmp_path: Path) -> None:
    cells: list[Cell] = [
        TrainingCell(design="3lc[s=1.5]", model="mlp", data="digits", workers=2, steps=6, eval_steps=3, seed=seed)
        for seed in range(2)
    ]
    of = Study[TrainingCell, TrainingFinding](
        cells=lambda scale: [], run=train, show=lambda found: Shown(setting=""), finding=TrainingFinding
    )
    found = []
    for jobs in (1, 2):
        results = Results[Finding](tmp_path / f"{jobs}.json", [TrainingFinding])
        make(dict.fromkeys(cells, of), results, jobs=jobs, on_cell=lambda *_: None, on_progress=lambda *_: None)
        found.append([results.find(cell.key()) for cell in cells])
    assert found[0] == found[1] and found[0][0] != found[0][1]
