"""Makes the runs of entries, stores each finding at once, and shows them.

`results.json` in the folder holds all findings by their cells: an interrupted command continues, entries with equal
cells share the runs, and another scale adds its runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from thinwire.errors import EngineError
from thinwire.extras import require
from thinwire.presentation.charts import draw
from thinwire.presentation.page import chart_html, document, table_html, write_page
from thinwire_lab.jobs.grid import Grid, Measured, OnCell, Tell, run
from thinwire_lab.jobs.results import Machine, Results, read_runs
from thinwire_lab.studies.options import REPORT, RESULTS
from thinwire_lab.studies.reproduce.entry import Cell, Entry, Finding, Found, Scale, Shown

TRIES = 5
"""The maximum number of runs of a cell, until its finding is possible."""


def reproduce(
    entries: Sequence[Entry],
    scale: Scale,
    folder: Path,
    *,
    kinds: Sequence[type[Finding]],
    command: str,
    seeds: int | None = None,
    join: Sequence[Path] = (),
    on_cell: OnCell[Cell] = lambda *_: None,
    tell: Tell = lambda text: None,
) -> list[tuple[Entry, Shown]]:
    """Makes the runs that the folder lacks, and writes the page, which quotes `command`; returns its entries.

    `join` names other files of results; the folder takes the runs that it lacks.
    """
    require("report.html", "matplotlib")
    kinds = list(dict.fromkeys(kinds))
    results = Results(folder / RESULTS, kinds)
    if sum([results.join(read_runs(path, kinds)) for path in join]):
        results.save({})
    asked = {entry.id: _of_seeds(entry.cells(scale), seeds) for entry in entries}
    needed = list(dict.fromkeys(cell for cells in asked.values() for cell in cells))
    made: dict[Cell, Finding] = {}
    run(Runs(needed), results, made, on_cell=on_cell, tell=tell)
    shown = [(entry, entry.show(Found({cell: made[cell] for cell in asked[entry.id]}))) for entry in entries]
    keys = [cell.key() for cell in needed]
    machines = list(dict.fromkeys(run.machine for run in results.runs if run.job in keys))
    date = datetime.now(UTC).date().isoformat()
    write_page(folder / REPORT, page(shown, scale, machines, command=command, date=date))
    return shown


class Runs(Grid[Cell, Finding]):
    """The cells of all entries.

    Cells of two classes may have equal settings if one class's finding extends the other's; the larger finding serves
    both.
    """

    kinds = (Finding,)

    def __init__(self, needed: Sequence[Cell]) -> None:
        self._needed = needed

    def cells(self) -> Sequence[Cell]:
        return self._needed

    def outdated(self, cell: Cell, figures: Finding, before: Measured[Cell, Finding]) -> bool:
        return not isinstance(figures, cell.finding) or cell.impossible(figures) is not None

    def measure(self, cell: Cell, before: Measured[Cell, Finding], tell: Tell) -> Finding:
        for _ in range(TRIES):
            finding = cell.run(tell)
            if (wrong := cell.impossible(finding)) is None:
                return finding
        raise EngineError(
            f"{cell}: {wrong}, in the last of {TRIES} tries. This machine is loaded: run the same command again when "
            "it is idle"
        )


def draw_charts(
    shown: Sequence[tuple[Entry, Shown]], folder: Path, endings: Sequence[str] = ("png", "svg")
) -> list[Path]:
    charts = [chart for _, each in shown for chart in each.charts]
    paths = [[folder / f"{chart.name}.{ending}" for ending in endings] for chart in charts]
    for chart, files in zip(charts, paths, strict=True):
        draw(chart, *files)
    return [path for files in paths for path in files]


def _of_seeds(cells: Sequence[Cell], seeds: int | None) -> list[Cell]:
    return [cell for cell in cells if seeds is None or getattr(cell, "seed", 0) < seeds]


def page(
    shown: Sequence[tuple[Entry, Shown]], scale: Scale, machines: Sequence[Machine], *, command: str, date: str
) -> str:
    """Returns one self-contained page with every chart and table."""
    title = f"Reproduced: {', '.join(dict.fromkeys(entry.paper for entry, _ in shown))}"
    where = "; ".join(dict.fromkeys(each.text for each in machines))
    about = f"Scale: {scale}. Command: {command}. Measured on: {where or 'nothing yet'}. Date: {date}."
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(about)}</p>"]
    for entry, each in shown:
        parts += _section(entry, each)
    return document(title, parts)


def _section(entry: Entry, shown: Shown) -> list[str]:
    scaled = [entry.why] if entry.status == "scaled" else []
    parts = [f'<h2 id="{entry.id}">{escape(entry.id)}</h2>', f"<p><b>{escape(entry.title)}.</b></p>"]
    parts += [f"<p>{escape(text)}</p>" for text in (shown.setting, *scaled)]
    parts += [table_html(table) for table in shown.tables]
    parts += [chart_html(chart, " ".join((chart.caption, shown.setting, *scaled))) for chart in shown.charts]
    return [*parts, *(f"<p>{escape(note)}</p>" for note in shown.notes)]
