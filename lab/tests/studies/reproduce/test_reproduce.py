"""Every entry at the tiny scale: tables, pictures and a page; and the stored runs of a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest

from thinwire.errors import ConfigError
from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.jobs import grid
from thinwire_lab.jobs.grid import Tell
from thinwire_lab.jobs.results import Results
from thinwire_lab.studies.options import RESULTS
from thinwire_lab.studies.reproduce.catalog import CATALOG, PAPERS, entries, finding_kinds
from thinwire_lab.studies.reproduce.entry import Cell, Entry, Finding, Scale, Shown
from thinwire_lab.studies.reproduce.run import Runs, draw_charts, reproduce

pytestmark = pytest.mark.timeout(900)
"""All reproductions together are half a minute of a processor, which may have much else to do."""

RUNNABLE = [entry for entry in CATALOG if entry.made and not entry.links]
"""Entries with links start processes in namespaces."""

Pages = list[tuple[Entry, Shown]]


class Tossed(Finding, frozen=True, kw_only=True):
    value: float


class WhenTossed(Tossed, frozen=True, kw_only=True):
    second: float


class Toss(Cell, frozen=True, kw_only=True):
    finding: ClassVar[type[Tossed]] = Tossed
    number: int

    def __str__(self) -> str:
        return f"toss {self.number}"

    def run(self, tell: Tell) -> Tossed:
        tell("half")
        return Tossed(value=10.0 * self.number)


class Interrupted(Toss, frozen=True, kw_only=True, tag="Toss"):
    """Ctrl-C comes during all but the first."""

    def run(self, tell: Tell) -> Tossed:
        if self.number:
            raise KeyboardInterrupt
        return super().run(tell)


def tosses(scale: Scale, kind: type[Toss] = Toss) -> list[Toss]:
    return [kind(number=number) for number in range(2 if scale == "quick" else 3)]


def show(findings: Mapping[Toss, Tossed]) -> Shown:
    values = [finding.value for finding in findings.values()]
    series = [
        Series(label="ours", x=list(range(len(values))), y=values, error=[1.0] * len(values)),
        Series(label="paper", x=[0.0, 1.0], y=[1.0, 2.0], role="paper"),
    ]
    bars = [Series(label="ours", x=["a", "b"], y=[1.0, 2.0]), Series(label="other", x=["a", "b"], y=[2.0, 1.0])]
    panels = [
        Panel(title="one", x_label="x", y_label="y", series=series),
        Panel(title="two", x_label="x", y_label="y", series=series, kind="points", y_log=True),
        Panel(title="three", x_label="x", y_label="y", series=bars, kind="bars"),
    ]
    table = Table(["", "paper", "ours", "remark"], [["a < b", "1", f"{sum(values):g}", "</script> is text"]])
    return Shown(setting="tosses", tables=[table], charts=[Chart(name="toss", caption="a & b", panels=panels)])


def entry(kind: type[Toss] = Toss) -> Entry:
    toss: dict[str, Any] = {"cells": lambda scale: tosses(scale, kind), "show": show}
    return Entry(paper="3lc", item="figure-99", shows="tosses", status="done", **toss)


def run(folder: Path, scale: Scale, made: list[str], *, of: Entry) -> Pages:
    told = lambda _, __, cell: made.append(str(cell))  # noqa: E731
    return reproduce([of], scale, folder, kinds=[Tossed], command="x", on_cell=told)


def test_reproduce_runs_cells_once_and_continues(tmp_path: Path) -> None:
    made: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "quick", made, of=entry(Interrupted))
    assert made == ["toss 0", "toss 1"]
    made.clear()
    run(tmp_path, "quick", made, of=entry())
    run(tmp_path, "quick", made, of=entry())
    run(tmp_path, "full", made, of=entry())
    assert made == ["toss 1", "toss 2"], "what is there is not run again, and another scale adds what it lacks"
    stored = json.loads((tmp_path / RESULTS).read_text())
    assert [each["job"] for each in stored["runs"]] == [{"kind": "Toss", "number": number} for number in range(3)]


class Dated(Toss, frozen=True, kw_only=True, tag="Toss"):
    """Has the settings of a toss, and a larger finding."""

    finding = WhenTossed

    def run(self, tell: Tell) -> WhenTossed:
        return WhenTossed(value=10.0 * self.number, second=1.0)


@pytest.mark.parametrize("kinds", [(Toss, Dated), (Dated, Toss)])
def test_larger_finding_of_equal_settings_serves_both(kinds: Sequence[type[Toss]], tmp_path: Path) -> None:
    results = Results[Finding](tmp_path / RESULTS, [Tossed, WhenTossed])
    cells = [kind(number=3) for kind in kinds]
    grid.run(Runs(cells), results, {})
    assert [type(each.outcome) for each in results.runs] == [WhenTossed]


def test_reproduce_join_adds_runs_of_another_folder(tmp_path: Path) -> None:
    first, second, made = tmp_path / "first", tmp_path / "second", list[str]()
    run(first, "quick", [], of=entry())
    reproduce(
        *([entry()], "full", second),
        kinds=[Tossed],
        command="x",
        join=[first / RESULTS],
        on_cell=lambda _, __, cell: made.append(str(cell)),
    )
    assert made == ["toss 2"], "a joined run is not made again"
    assert [each.outcome.value for each in Results(second / RESULTS, [Tossed]).runs] == [0, 10, 20]
    with pytest.raises(ConfigError, match="cannot be read"):
        reproduce([entry()], "quick", second, kinds=[Tossed], command="x", join=[tmp_path / "none.json"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pages]:
    """Everything that can be run in one process, at the tiny scale; each chart is drawn once, in one format."""
    folder = tmp_path_factory.mktemp("tiny")
    kinds: list[type[Finding]] = [Tossed, *finding_kinds()]
    made = reproduce([entry(), *RUNNABLE], "tiny", folder, kinds=kinds, command="x < y")
    assert all(path.is_file() for path in draw_charts(made, folder, ["svg"]))
    return folder, made


def test_every_entry_has_tables_or_charts(tiny: tuple[Path, Pages]) -> None:
    folder, made = tiny
    assert [each.id for each, _ in made] == ["3lc-figure-99", *(each.id for each in RUNNABLE)]
    for each, shown in made:
        assert shown.setting and (shown.tables or shown.charts), each.id
        for table in shown.tables:
            assert table.lines and all(len(line) == len(table.header) for line in table.lines), each.id
        for chart in shown.charts:
            svg = ElementTree.parse(folder / f"{chart.name}.svg").getroot()
            axes = [each for each in svg.iter() if str(each.get("id")).startswith("axes_")]
            assert len(axes) == len(chart.panels) and all(len(each) > 3 for each in axes), chart.name
    assert all((folder / name).is_file() for name in ("results.json", "report.html"))
    names = [chart.name for _, shown in made for chart in shown.charts]
    assert len(set(names)) == len(names)


def test_catalogue_is_complete_and_finds_names() -> None:
    ids = [each.id for each in CATALOG]
    assert len(set(ids)) == len(ids) and {each.paper for each in CATALOG} == set(PAPERS)
    assert len(ids) == 46
    assert all(each.paper == "3lc" and each.made for each in entries("3lc"))
    assert [each.id for each in entries("all")] == [each.id for paper in PAPERS for each in entries(paper)]
    for name, meant in {"3LC": "3lc", "Entropy": "entropy"}.items():
        assert entries(name) == entries(meant)
    for wrong, told in {
        "3lc-tabel-2": "did you mean 3lc-table-2",
        "nothing": "papers are 3lc, entropy",
        "3lc-figure-2": "3lc-figure-2 cannot be run: drawing. explains the codec",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(told)):
            entries(wrong)


def test_every_entry_with_links_has_a_cell_that_processes_run() -> None:
    """Runs one such cell at the tiny scale; cells of one kind differ in names and numbers."""
    run: set[type[Cell]] = set()
    for each in CATALOG:
        for cell in each.cells("tiny") if each.links else []:
            if type(cell) not in run:
                run.add(type(cell))
                finding = cell.run(lambda *_: None)
                assert isinstance(finding, cell.finding) and str(cell), each.id
    assert len(run) > 2
