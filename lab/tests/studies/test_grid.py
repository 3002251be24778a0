"""Runs in parallel: the same findings, failures that name the run, and timed runs alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from thinwire.errors import EngineError
from thinwire_lab.jobs.results import Results
from thinwire_lab.studies.reproduce.entry import Cell, Finding, OnProgress
from thinwire_lab.studies.reproduce.job_cells import TrainingCell, TrainingFinding
from thinwire_lab.studies.reproduce.run import found, make


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own finds the cells by the name of this module."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3])


class Where(Finding, frozen=True, kw_only=True):
    process: int


class Spot(Cell, frozen=True, kw_only=True):
    timed = False
    finding: ClassVar[type[Where]] = Where
    number: int

    def __str__(self) -> str:
        return f"spot {self.number}"

    def run(self, on_progress: OnProgress) -> Where:
        on_progress(0.5, "half")
        time.sleep(0.2)
        return Where(process=os.getpid())


class Timed(Spot, frozen=True, kw_only=True):
    timed = True


class Failing(Spot, frozen=True, kw_only=True):
    def run(self, on_progress: OnProgress) -> Where:
        if self.number == 2:
            raise ZeroDivisionError("two are too many")
        return Where(process=os.getpid())


class Ending(Spot, frozen=True, kw_only=True):
    def run(self, on_progress: OnProgress) -> Where:
        os.kill(os.getpid(), signal.SIGKILL)
        return Where(process=0)


class WhereAndWhen(Where, frozen=True, kw_only=True):
    second: float


class Dated(Spot, frozen=True, kw_only=True, tag="Spot"):
    """Has the settings of a spot, and a larger finding."""

    finding = WhereAndWhen

    def run(self, on_progress: OnProgress) -> WhereAndWhen:
        return WhereAndWhen(process=os.getpid(), second=float(self.number))


def silently(needed: Sequence[Cell], results: Results[Finding], *, jobs: int) -> None:
    make(needed, results, jobs=jobs, on_cell=lambda *_: None, on_progress=lambda *_: None)


def test_untimed_runs_are_made_in_parallel_and_timed_ones_alone(tmp_path: Path) -> None:
    results, told = Results[Finding](tmp_path / "results.json", [Where]), list[tuple[int, int, str]]()
    cells: list[Cell] = [Timed(number=0), *(Spot(number=number) for number in range(1, 5)), Timed(number=5)]
    progress: dict[Cell, list[float]] = {cell: [] for cell in cells}
    make(
        *(cells, results),
        jobs=2,
        on_cell=lambda number, total, cell: told.append((number, total, str(cell))),
        on_progress=lambda cell, share, text: progress[cell].append(share),
    )
    assert told == [(number + 1, 6, f"spot {number}") for number in (1, 2, 3, 4, 0, 5)]
    assert all(shares == [0.5, 1.0] for shares in progress.values())
    processes = [each.process for cell in cells if isinstance(each := found(results, cell), Where)]
    assert processes[0] == processes[5] == os.getpid()
    assert len(set(processes)) == 3, "two processes, with two runs each"


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Failing, "(?s)spot 2: Traceback.*two are too many"), (Ending, "spot [01]: its process ended with status -9")],
)
def test_a_failure_names_its_run_and_keeps_the_others(kind: type[Spot], message: str, tmp_path: Path) -> None:
    results = Results[Finding](tmp_path / "results.json", [Where])
    with pytest.raises(EngineError, match=message):
        silently([kind(number=number) for number in range(3)], results, jobs=2)
    kept = Results[Finding](tmp_path / "results.json", [Where]).runs
    assert len(kept) >= 1 if kind is Failing else not kept


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("kinds", [(Spot, Dated), (Dated, Spot)])
def test_the_larger_finding_of_equal_settings_serves_both(
    kinds: Sequence[type[Spot]], jobs: int, tmp_path: Path
) -> None:
    together = Results[Finding](tmp_path / "together.json", [Where, WhereAndWhen])
    cells = [kind(number=3) for kind in kinds]
    silently(cells, together, jobs=jobs)
    assert len(together.runs) == 1 and all(isinstance(found(together, cell), WhereAndWhen) for cell in cells)


def test_trainings_in_parallel_come_to_the_same_bits(tmp_path: Path) -> None:
    cells: list[Cell] = [
        TrainingCell(design="3lc[s=1.5]", model="mlp", data="digits", workers=2, steps=6, eval_steps=3, seed=seed)
        for seed in range(2)
    ]
    outcomes = []
    for jobs in (1, 2):
        results = Results[Finding](tmp_path / f"{jobs}.json", [TrainingFinding])
        silently(cells, results, jobs=jobs)
        outcomes.append([found(results, cell) for cell in cells])
    assert outcomes[0] == outcomes[1] and outcomes[0][0] != outcomes[0][1]
