"""`thinwire reproduce`: tables and figures of the papers, beside the papers' numbers."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from thinwire.cli.console import console, say_wrote, show, write_json
from thinwire.cli.lazy import lazily
from thinwire.cli.outputs import check_apart
from thinwire.errors import ConfigError
from thinwire.presentation.tables import Table
from thinwire_lab.cli import options
from thinwire_lab.cli.folders import writable_folder
from thinwire_lab.cli.progress import GridProgress
from thinwire_lab.engines.system_tools import with_privileges
from thinwire_lab.studies.options import REPORT, RESULTS

with lazily():
    from thinwire_lab.studies.reproduce import catalog
    from thinwire_lab.studies.reproduce import run as making

app = typer.Typer()

LIST = "list"


class Scale(StrEnum):
    """The length of the runs."""

    quick = "quick"
    full = "full"


What = Annotated[list[str], typer.Argument(help="`list`, `all`, or papers (3lc) and their items (3lc-table-2).")]
Out = Annotated[Path, typer.Option(file_okay=False, help="Folder of results.json, report.html and pictures.")]
Length = Annotated[Scale, typer.Option(help="quick: at most ten minutes a paper on two cores; full: for results.")]

Seeds = Annotated[
    int | None,
    typer.Option(min=1, help="Number of the scale's seeds; a later command can add the rest. By default all."),
]
Join = Annotated[
    list[Path] | None,
    typer.Option(
        "--join",
        exists=True,
        dir_okay=False,
        help="Add the runs of another results.json. Repeat for several.",
    ),
]


@app.command(epilog="Example: thinwire reproduce 3lc-table-2 --scale quick --out out/3lc")
def reproduce(
    what: What,
    scale: Length = Scale.quick,
    seeds: Seeds = None,
    join: Join = None,
    out: Out = Path("thinwire-reproduce"),
    json: options.Json = None,
) -> None:
    """Reproduce tables and figures of the papers, and show ours beside the paper's.

    The command makes only the runs that results.json lacks: an interrupted command continues, and items that need the
    same runs share them.
    """
    if LIST in [name.lower() for name in what]:
        if others := [name for name in what if name.lower() != LIST]:
            raise ConfigError(f"`list` stands alone; leave out {', '.join(others)}")
        _list(json)
        return
    chosen = list({entry.id: entry for name in what for entry in catalog.entries(name)}.values())
    if any(entry.links for entry in chosen):
        with_privileges("10mbit", "auto")
    writable_folder(out)
    check_apart(json, [out / RESULTS, out / REPORT], "the runs are kept, or the page is written")
    check_apart(json, join or [], "runs to join are")
    fewer = "" if seeds is None else f" --seeds {seeds}"
    fewer += "".join(f" --join {shlex.quote(str(path))}" for path in join or [])
    command = f"thinwire reproduce {' '.join(what)} --scale {scale.value}{fewer} --out {shlex.quote(str(out))}"
    progress = GridProgress()
    try:
        with progress.bar:
            entries = making.reproduce(
                chosen,
                scale.value,
                out,
                kinds=catalog.finding_kinds(),
                command=command,
                seeds=seeds,
                join=join or [],
                on_cell=progress.on_cell,
                tell=progress.tell,
            )
    except KeyboardInterrupt:
        more = "" if json is None else f" --json {shlex.quote(str(json))}"
        console.print(f"finished runs are kept; continue with: {escape(command + more)}", soft_wrap=True)
        raise
    named = ("id", "title", "status", "why")
    shown = [{name: getattr(entry, name) for name in named} | vars(each) for entry, each in entries]
    # First, for standard output may be closed.
    write_json(json, {"command": command, "entries": shown})
    for entry, each in entries:
        console.print(f"\n[bold]{entry.id}[/] {escape(entry.title)}", soft_wrap=True)
        why = f" {entry.why}" if entry.status == "scaled" else ""
        console.print(escape(each.setting + why), highlight=False)
        for table in each.tables:
            show(table)
        for note in each.notes:
            console.print(escape(note), highlight=False)
    for path in (out / RESULTS, out / REPORT):
        say_wrote(path)
    for path in making.draw_charts(entries, out):  # last, for a full disk must not cost the tables
        say_wrote(path)


def _list(json: Path | None) -> None:
    names = ("id", "paper", "shows", "status", "why", "minutes")
    write_json(json, [{name: getattr(entry, name) for name in names} for entry in catalog.CATALOG])
    lines = [
        [
            entry.id,
            entry.status,
            entry.shows + (f" ({entry.why})" if entry.status in ("impossible", "drawing") else ""),
            f"{entry.minutes:g}" if entry.minutes else "–",
        ]
        for entry in catalog.CATALOG
    ]
    show(
        Table(
            ["id", "status", "what it shows", "minutes"], lines, "minutes of quick on two idle cores, estimated", left=3
        )
    )
