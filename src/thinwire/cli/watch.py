"""`thinwire watch`: a training's step records as a dashboard in the terminal, while they come."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import rich.table
import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from thinwire.cli import options
from thinwire.cli.console import console, errors, table, write_json
from thinwire.cli.outputs import check_apart
from thinwire.errors import ConfigError, TransportError
from thinwire.quantities import counted, ms_text, nbytes_text, rate_text, seconds_text
from thinwire.reports.learners import Learners
from thinwire.reports.step_figures import Figures, RecordedSteps
from thinwire.reports.training_page import ratio_of, tensors_table
from thinwire.runtime.record_files import RecordAddress, RecordFile

app = typer.Typer()

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://.*|[^/]+:\d+(/.*)?", re.IGNORECASE)
"""Of a server, and hardly of a file."""
SILENT_S, SILENT_STEPS = 30.0, 10
"""After so long, and so many recorded steps' time, without a new one `watch` says since when."""
NEWEST_NBYTES = 1 << 25
"""Of a long file only the end is read: some 80,000 records, in less than a second."""
LEFT_OUT = ("line is no step record and was left out", "lines are no step records and were left out")

Source = Annotated[
    str,
    typer.Argument(
        metavar="FILE|DIR|URL", help="What --telemetry writes: the file, a folder with it, or its http:// address."
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Show what is there and end.")]
Interval = Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between two looks.")]
Newest = Annotated[int, typer.Option(min=2, help="So many of the newest steps are averaged.")]
Tables = Annotated[int, typer.Option(min=0, help="So many tensors are listed, largest by bytes first.")]


@app.command(
    epilog="Example: thinwire train --design '3lc[s=1.75]' --telemetry steps.jsonl & thinwire watch steps.jsonl"
)
def watch(
    source: Source,
    once: Once = False,
    interval: Interval = 1.0,
    steps: Newest = 50,
    tensors: Tables = 10,
    json: options.Json = None,
) -> None:
    """Show a training while it runs: speed, bytes, ratio, lag and its largest tensors.

    All figures are of one worker and one step, means over the newest steps and all workers in the file. A file that is
    not there yet is waited for; of a folder its one *.jsonl is followed. Ctrl-C ends.
    """
    is_url = source.lower().startswith(("http://", "https://"))
    if not is_url:
        source = _file(source)
        check_apart(json, [Path(source)], "the step records are")
    missing = not is_url and not Path(source).exists()
    if once and missing:
        raise ConfigError(f"{source}: there is no such file; start a training with --telemetry {source} first")
    records = RecordAddress(source) if is_url else RecordFile(Path(source), NEWEST_NBYTES)
    recorded, ended = RecordedSteps(), None

    def look() -> Group:
        word = f"waiting for {source}, which is not there yet" if not is_url and not Path(source).exists() else ""
        try:
            for record in records.read():
                recorded.add(record)
            recorded.keep(steps + 1)
        except TransportError as error:
            if once:
                raise
            word = str(error)
        figures = recorded.figures(leave_out=1)
        word = word or silence(figures, time.time())
        return frame(figures, source, tensors, learners=recorded.learners, damaged=records.damaged, word=word)

    if once:
        shown = look()
        if records.damaged and not recorded.steps:
            lines = "its line is" if records.damaged == 1 else f"its {records.damaged:,} lines are"
            raise ConfigError(f"{source}: {lines} no step record; give what --telemetry wrote")
        console.print(shown)
    else:
        if not console.is_terminal:  # figures cannot be written over there: only the last ones are
            hint = "no terminal: figures are written once, at the end; --once writes those of now"
            errors.print(hint, soft_wrap=True)
        try:
            with suppress(KeyboardInterrupt), Live(look(), console=console, auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    live.update(look(), refresh=True)
        except SystemExit as error:  # SIGTERM, as `timeout` sends it
            ended = error
        if not console.is_terminal:
            console.print()  # there the last frame comes without the end of its line
    shown_learners = {"learners": [asdict(each) for each in recorded.learners.figures()]}
    write_json(json, {**asdict(recorded.figures(leave_out=1)), **shown_learners, "damaged": records.damaged})
    if ended is not None:
        raise ended


def _file(source: str) -> str:
    """Returns the file to follow: a folder's only one.

    Raises:
        ConfigError: the folder has none or several, or an address lacks its http://, or has another.
    """
    path = Path(source)
    if path.is_dir():
        found = sorted(path.glob("*.jsonl"))
        if len(found) != 1:
            there = ", ".join(each.name for each in found) or "none"
            raise ConfigError(f"{source}: a folder is watched for its one *.jsonl, and there are: {there}; name a file")
        return str(found[0])
    if _ADDRESS.fullmatch(source) and not path.exists():
        address = source.rpartition("://")[2]
        raise ConfigError(f"{source}: a file is watched, by its path or by http:// or https://, as in http://{address}")
    return source


def frame(
    figures: Figures, source: str, tensors: int, *, learners: Learners | None = None, damaged: int = 0, word: str = ""
) -> Group:
    """Returns one picture of the dashboard.

    Args:
        figures: of the newest steps.
        source: where they come from.
        tensors: how many are listed.
        learners: that never wait, where there are some.
        damaged: lines that were no records.
        word: what is to be said besides, if anything.
    """
    notes = [word] if word else []
    if damaged:
        notes.append(f"{damaged:,} {LEFT_OUT[damaged > 1]}")
    below = [Text(note, style="yellow") for note in notes]
    if figures.last_step < 0:
        return Group(Text(f"{source}: no step yet"), *below)
    grid = rich.table.Table.grid(padding=(0, 2))
    for name, value in _lines(figures):
        grid.add_row(f"[bold]{name}[/]", escape(value))
    title = Text(f"{source}: step {figures.last_step:,}, {counted(figures.ranks, 'worker')}", style="bold")
    listed = table(tensors_table(figures, tensors))
    if (more := len(figures.tables) - tensors) > 0:
        listed.caption = f"{more} more, which are smaller"
    merged = []
    if learners is not None and learners.figures():
        merged.append(table(learners.table()))
        if (goodput := learners.goodput()) is not None:
            merged[0].caption = f"goodput: {goodput:.0%} of the learners' best speeds"
    return Group(title, grid, *merged, *([listed] if tensors else []), *below)


def silence(figures: Figures, now: float) -> str:
    """Returns since when no step has come, where that is long: the training has ended, died or waits."""
    silent = now - figures.last_s
    if not figures.last_s or silent < max(SILENT_S, SILENT_STEPS * (figures.record_s or 0.0)):
        return ""
    return f"no step for {seconds_text(silent)}: the training has ended, or waits"


def _lines(figures: Figures) -> list[tuple[str, str]]:
    seconds = f"encode {ms_text(figures.encode_s)}, decode {ms_text(figures.decode_s)}, wait {ms_text(figures.wait_s)}"
    speed = "not recorded"
    if figures.step_s:
        speed = f"{1 / figures.step_s:.3g} steps/s, {ms_text(figures.step_s)} a step"
        seconds += f": {figures.exchange_s / figures.step_s:.0%} of a step"
    elif figures.steps < 2:
        speed = "more steps are needed"
    plain = f"{nbytes_text(figures.plain_nbytes)} in the tensors' own dtype"
    travelled = f"{nbytes_text(figures.push_nbytes)} up, {nbytes_text(figures.pull_nbytes)} down a step, of {plain}"
    lines = [
        ("speed", f"{speed} ({figures.steps:,} of {counted(figures.of_steps, 'step')} recorded)"),
        ("bytes", travelled),
        (
            "ratio",
            f"{figures.ratio:.1f}× less {ratio_of(figures)}" if figures.ratio else f"nothing travelled, of {plain}",
        ),
        ("time", seconds),
    ]
    if figures.link_bps is not None:
        lines.append(("link", f"{rate_text(figures.link_bps)}, the slowest between ranks"))
    if figures.lag is not None:
        lines.append(("lag", f"{figures.lag:.1f} steps of updates wait in {figures.lag_table}, the most of any tensor"))
    if figures.lost_at is not None:
        lines.append(("loss", f"NaN or Inf since step {figures.lost_at}"))
    elif figures.loss is not None:
        lines.append(("loss", f"{figures.loss:.5g}"))
    if figures.accuracy is not None:
        lines.append(("accuracy", f"{figures.accuracy:.2%}"))
    return lines
