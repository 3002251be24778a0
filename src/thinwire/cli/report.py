"""`thinwire report`: one training's step records as a page, with a verdict."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from thinwire.cli import options
from thinwire.cli.console import console, say_wrote, write_json
from thinwire.cli.lazy import lazily
from thinwire.cli.outputs import check_apart

with lazily():
    from thinwire.presentation import page
    from thinwire.reports import recorded_run, training_page

app = typer.Typer()
REPORT = "report.html"

Run = Annotated[Path, typer.Argument(metavar="FILE|DIR", help="What --telemetry wrote, or a folder with it.")]
Out = Annotated[
    Path | None, typer.Option(dir_okay=False, help="The page; by default report.html in DIR, or FILE with .html.")
]


@app.command(epilog="Example: mkdir run && thinwire train --telemetry run/steps.jsonl && thinwire report run")
def report(run: Run, out: Out = None, json: options.Json = None) -> None:
    """Make one page of a training's step records: times, bytes, ratio, lag, accuracy, and a verdict.

    The page needs no other file and no network. All *.jsonl of a folder are of one training.
    """
    read = recorded_run.read_run(run)
    path = out or (run / REPORT if run.is_dir() else run.with_suffix(".html"))
    for written in (path, json):
        check_apart(written, read.files, "the step records are")
    check_apart(json, [path], "the page is written")
    command = f"thinwire report {shlex.quote(str(run))}" + ("" if out is None else f" --out {shlex.quote(str(out))}")
    page.write_page(path, training_page.page(read, command))
    figures = read.recorded.figures()
    sentences = training_page.verdict(figures)
    write_json(json, {"verdict": sentences, **asdict(figures), "damaged": read.damaged})
    console.print(escape(" ".join(sentences)), highlight=False)
    say_wrote(path)
