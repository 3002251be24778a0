"""The harness: results by cell, stored at once, as tables and as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from thinwire_lab.bench.harness import Bench, Figures, Tell, column
from thinwire_lab.jobs import grid
from thinwire_lab.jobs.grid import Measured
from thinwire_lab.jobs.results import Results


@dataclass(frozen=True)
class Cell:
    name: str


class Took(Figures, frozen=True, kw_only=True):
    seconds: float
    size: int | None = None
    by: str = "clock"


@dataclass(kw_only=True)
class Letters(Bench[Cell, Took]):
    names: Sequence[str] = ("a", "b")
    broken: str = ""

    kinds = (Took,)
    columns = (
        ("name", lambda cell, runs: cell.name),
        column("size", "size"),
        column("s", "seconds", "{:.3f}"),
    )

    def cells(self) -> list[Cell]:
        return [Cell(name) for name in self.names]

    def measure(self, cell: Cell, before: Measured[Cell, Took], tell: Tell) -> Took:
        tell(f"measuring {cell.name}")
        if cell.name == self.broken:
            raise KeyboardInterrupt
        return Took(seconds=(1 + len(before)) / 1000)

    def failed(self, figures: Took) -> bool:
        return figures.seconds == 0.002


def measured_by(bench: Letters, path: Path | None, made: list[str] | None = None) -> dict[Cell, Took]:
    measured: dict[Cell, Took] = {}
    grid.run(
        bench,
        Results(path, bench.kinds),
        measured,
        on_cell=lambda number, total, cell: None if made is None else made.append(f"{number}/{total} {cell.name}"),
    )
    return measured


def test_bench_rows_are_cells_with_figures(tmp_path: Path) -> None:
    made: list[str] = []
    bench = Letters()
    measured = measured_by(bench, tmp_path / "file.json", made)
    assert made == ["1/2 a", "2/2 b"]
    [table] = bench.tables(measured)
    assert table.header == ["name", "size", "s"]
    assert table.lines == [["a", "–", "0.001"], ["b", "–", "0.002"]]
    data = json.loads((tmp_path / "file.json").read_text())
    assert data["rows"][0] == {"name": "a", "seconds": 0.001, "size": None, "by": "clock"}
    assert [run["job"] for run in data["runs"]] == [{"name": "a"}, {"name": "b"}]


def test_grid_repeats_failed_cells_alone(tmp_path: Path) -> None:
    path, made = tmp_path / "file.json", list[str]()
    with pytest.raises(KeyboardInterrupt):
        measured_by(Letters(names=("a", "b", "c"), broken="c"), path)
    measured = measured_by(Letters(names=("a", "b", "c")), path, made)
    assert made == ["2/3 b", "3/3 c"], "b, at 0.002 s, counts as failed"
    assert [cell.name for cell in measured] == ["a", "b", "c"]
