"""Runs what entries need, keeps every finding as soon as it is there, and shows them.

`results.json` in the folder holds all findings by their cells. An interrupted run goes on where it was, a finished one
can be asked for more entries or another scale, and two entries with equal cells share the runs. Where it is not there,
those of the folder's page are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.presentation.charts import PICTURES, Picture, draw
from thinwire.presentation.interactive import require_plotly
from thinwire.presentation.page import write_page
from thinwire_lab.jobs.results import Results
from thinwire_lab.studies.files import REPORT, RESULTS
from thinwire_lab.studies.machines import mixed, mixed_versions
from thinwire_lab.studies.reproduce.entry import Cell, Entry, Finding, Scale, Shown
from thinwire_lab.studies.reproduce.making import OnCell, OnCellProgress, found, make
from thinwire_lab.studies.reproduce.packed_runs import pack, read_left, read_packed
from thinwire_lab.studies.reproduce.page import page


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """What each entry has to show, the files that hold it but for pictures, and entries whose runs are not all kept."""

    shown: Sequence[tuple[Entry, Shown]]
    left_out: Sequence[Entry]
    files: Sequence[Path]


def reproduce(
    entries: Sequence[Entry],
    scale: Scale,
    folder: Path,
    *,
    kinds: Sequence[type[Finding]],
    command: str,
    seeds: int | None = None,
    kept: bool = False,
    join: Sequence[Path] = (),
    jobs: int = 1,
    on_cell: OnCell = lambda *_: None,
    on_progress: OnCellProgress = lambda *_: None,
) -> Reproduced:
    """Makes the runs that the folder does not hold yet, then tables and the page.

    Args:
        entries: with a study each.
        scale: how long the runs are.
        folder: made where it is missing.
        kinds: the classes of all findings that the folder may hold.
        command: that makes the same again, for the page.
        seeds: how many of the scale's seeds; None takes all of them.
        kept: runs nothing: shows the entries whose runs the folder holds, with as many seeds as it has of all of them.
        join: pages and files of results that were made elsewhere, whose runs the folder takes where it lacks them.
        jobs: how many runs without seconds are made beside each other.
        on_cell, on_progress: told of the runs as they are made.

    Raises:
        ConfigError: the folder or what is to be joined cannot be read, the folder cannot be written, or plotly is not
            installed; with `kept`, it holds the runs of no entry.
        EngineError: a run failed; those before it are kept.
    """
    require_plotly()
    kinds = list(dict.fromkeys(kinds))
    results = Results(folder / RESULTS, kinds)
    joined = [read_left(folder, kinds), *(read_packed(path, kinds) for path in join)]
    if sum([results.join(runs) for runs in joined]):
        results.save({})
    studies = [(entry, entry.study) for entry in entries if entry.study is not None]
    asked = {entry.id: _of_seeds(study.cells(scale), seeds) for entry, study in studies}
    left_out = []
    if kept:
        first = list(dict.fromkeys(cell for cells in asked.values() for cell in cells if cell.seed_index() == 0))
        asked = {name: _kept(cells, results) for name, cells in asked.items()}
        left_out = [entry for entry, _ in studies if not asked[entry.id]]
        studies = [(entry, study) for entry, study in studies if asked[entry.id]]
        if not studies:
            lacking = [cell for cell in first if found(results, cell) is None]
            raise ConfigError(
                f"{folder / RESULTS} holds all runs of none of these items at this scale, on the data that is here; "
                f"of the first seed it lacks {len(lacking)} of {len(first)}, such as {lacking[0]}"
            )
    needed = list(dict.fromkeys(cell for entry, _ in studies for cell in asked[entry.id]))
    make(needed, results, jobs=jobs, on_cell=on_cell, on_progress=on_progress)
    findings = {cell: finding for cell in needed if (finding := found(results, cell)) is not None}
    shown = []
    for entry, study in studies:
        cells = asked[entry.id]
        made = study.show({cell: findings[cell] for cell in cells})
        shown.append((entry, replace(made, notes=[*made.notes, *_mixed(cells, results)])))
    keys = [cell.key() for cell in needed]
    runs = [run for run in results.runs if run.job in keys]
    machines = list(dict.fromkeys(run.machine for run in runs))
    files = [folder / RESULTS, folder / REPORT]
    date = datetime.now(UTC).date().isoformat()
    within, beside = pack(results.runs, folder)
    write_page(folder / REPORT, page(shown, scale, machines, command=command, date=date, packed=within))
    return Reproduced(shown=shown, left_out=left_out, files=[*files, *beside])


def draw_charts(made: Reproduced, folder: Path, pictures: Sequence[Picture] = PICTURES) -> list[Path]:
    """Draws every chart as a picture in some formats, and returns the files.

    Raises:
        ConfigError: one cannot be written.
    """
    return [path for _, each in made.shown for chart in each.charts for path in draw(chart, folder, pictures)]


def _mixed(cells: Sequence[Cell], results: Results[Finding]) -> list[str]:
    """Returns notes on cells whose seconds are not of one machine, or that not one version made."""
    keys, timed = [cell.key() for cell in cells], [cell.key() for cell in cells if cell.timed]
    return [
        *mixed(run.machine for run in results.runs if run.job in timed),
        *mixed_versions(run.machine for run in results.runs if run.job in keys),
    ]


def _of_seeds(cells: Sequence[Cell], seeds: int | None) -> list[Cell]:
    return [cell for cell in cells if seeds is None or cell.seed_index() < seeds]


def _kept(cells: Sequence[Cell], results: Results[Finding]) -> list[Cell]:
    """Those of the seeds before the first that lacks a run."""
    missing = [cell.seed_index() for cell in cells if found(results, cell) is None]
    return _of_seeds(cells, min(missing, default=None))
