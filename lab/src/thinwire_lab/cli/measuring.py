"""Measures a benchmark's grid behind a progress bar, and shows and writes the results, even of an interrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape

from thinwire.cli.console import console, save_picture, say_wrote, show
from thinwire.cli.lazy import lazily
from thinwire.cli.outputs import STANDARD_OUTPUT, check_apart
from thinwire.errors import ConfigError, EngineError
from thinwire.extras import require
from thinwire_lab.cli.progress import GridProgress
from thinwire_lab.engines.system_tools import with_privileges

with lazily():
    from thinwire_lab.bench import harness
    from thinwire_lab.jobs import cluster, grid, results


def measure(bench: harness.Bench[Any, Any], json: Path | None, resume: bool, png: Path | None = None) -> None:
    """Measures a grid; shows and writes its results, also after an interruption."""
    if resume and json is None:
        raise ConfigError("--resume needs the file of results: add --json FILE")
    if json == STANDARD_OUTPUT:
        raise ConfigError("a measurement's --json needs a file, to which it adds every finished run: name one")
    if json is not None and json.is_file() and not resume:
        raise ConfigError(f"{json} exists: add to it with --resume, or give another file")
    check_apart(json, [png], "the picture is drawn")
    if bench.serves:
        require("a parameter server", "grpc")
    if png is not None:
        require("the picture of --png", "matplotlib")
    link, shaping = bench.thin_link()
    with_privileges(link, shaping)
    if link is not None:
        cluster.choose_links(link, shaping)  # raises before the first measurement if the link cannot be shaped
    stored: results.Results[Any] = results.Results(json, bench.kinds, fresh=not resume)
    measured: dict[Any, harness.Figures] = {}
    shown = GridProgress()

    def on_result(cell: Any, figures: harness.Figures) -> None:
        if (line := bench.line(cell, figures)) is not None:
            console.print(escape(line), highlight=False)

    try:
        with shown.bar:
            grid.run(bench, stored, measured, on_cell=shown.on_cell, on_result=on_result, tell=shown.tell)
    finally:
        if measured:
            for table in bench.tables(measured):
                show(table)
            for note in bench.notes(measured):
                console.print(escape(note), highlight=False)
            if json is not None and json.exists():
                say_wrote(json)
            if png is not None and (chart := bench.chart(measured)) is not None:
                save_picture(chart, png)
    if failed := [cell for cell, run in measured.items() if bench.failed(run)]:
        raise EngineError(f"{len(failed)} of {len(measured)} failed, the first of them {failed[0]}")
