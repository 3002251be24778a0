"""`thinwire bench server`: what a step costs the server's process, by design and number of workers."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from thinwire.bench.server import WARM, bench, run_load, serve_measured, verdicts
from thinwire.cli import options
from thinwire.cli.console import console, event, size, write_json
from thinwire.jobs.results import machine
from thinwire.studies.compare import split_names

app = typer.Typer()


@app.command(
    "server", epilog="Example: thinwire bench server --workers 4 --workers 8 --workers 16 --json out/server.json"
)
def server(
    workers: Annotated[
        list[int] | None, typer.Option(min=1, help="How many workers; repeat. Default: 4, 8, 16.")
    ] = None,
    designs: Annotated[str, typer.Option(help="Designs with commas; the first is what others are held against.")] = (
        "fp32,3lc[s=1.0]"
    ),
    model: options.Model = "lenet",
    data: options.Data = "fashion-mnist",
    steps: Annotated[int, typer.Option(min=WARM + 1, help="Steps of each run.")] = 60,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each cell; medians are shown.")] = 3,
    json: options.Json = None,
) -> None:
    """CPU seconds of the server's process per step, with ready-made gradients in place of workers."""
    names, counts = split_names(designs), workers or [4, 8, 16]
    rows = bench(names, counts, model=model, data=data, steps=steps, rounds=rounds)
    held = {(each["design"], each["workers"]): each for each in verdicts(rows, names[0])}
    table = Table(
        "workers",
        "design",
        "CPU ms a step",
        "fastest … slowest",
        "traffic a step",
        f"of {names[0]}",
        "growth / workers",
    )
    for row in rows:
        verdict = held[row["design"], row["workers"]]
        milliseconds = [1e3 * row[key] for key in ("cpu_seconds_per_step", "fastest", "slowest")]
        table.add_row(
            str(row["workers"]),
            escape(row["design"]),
            f"{milliseconds[0]:.1f}",
            f"{milliseconds[1]:.1f} … {milliseconds[2]:.1f}",
            size(row["bytes_per_step"]),
            f"{verdict['cost']:.2f}",
            f"{verdict['growth']:.2f}",
        )
    console.print(table)
    found: dict[str, Any] = {"machine": machine(), "rows": rows, "verdicts": list(held.values())}
    write_json(json, found)


@app.command(hidden=True)
def server_shard(
    steps: Annotated[int, typer.Option(min=WARM + 1)],
    listen: Annotated[str, typer.Option()],
    events: options.Events = False,
) -> None:
    """The server of `bench server`."""
    serve_measured(steps, listen, event if events else console.print)


@app.command(hidden=True)
def server_load(
    server: Annotated[str, typer.Option()],
    design: Annotated[str, typer.Option()],
    workers: Annotated[int, typer.Option(min=1)],
    model: Annotated[str, typer.Option()],
    data: Annotated[str, typer.Option()],
    steps: Annotated[int, typer.Option()],
    events: options.Events = False,
) -> None:
    """All the workers of `bench server`."""
    report = event if events else console.print
    run_load(server, design=design, workers=workers, model=model, data=data, steps=steps, report=report)
