"""`thinwire bench transports`: what a step costs without computation, by size of the messages."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from thinwire.bench import transports as data_plane
from thinwire.cli import options
from thinwire.cli.console import console, event, write_json
from thinwire.cli.roles import grpc_options
from thinwire.jobs.results import machine
from thinwire.runtime.connect import connect

app = typer.Typer()


@app.command(epilog="Example: thinwire bench transports --link none --link 100mbit --json transports.json")
def transports(
    link: Annotated[list[str] | None, typer.Option(help="Rate of every link; repeat for several.")] = None,
    workers: options.Workers = 4,
    steps: Annotated[int, typer.Option(min=5, help="Steps of each run.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each cell; medians are shown.")] = 3,
    shaping: options.Shaping = "auto",
    json: options.Json = None,
) -> None:
    """What a step costs without computation: 30 small tensors from every worker, by size of the messages.

    `data plane` pushes frames that are ready, through gRPC and the server's aggregation and update, and applies what
    comes down. `model` puts torch's autograd, hooks and optimizer interface before that.
    """
    links = link or ["none", "100mbit"]
    table = Table("link", "shaped by", "path", "messages", "ms a step", "fastest … slowest")
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=len(links) * len(data_plane.CELLS))

        def on_row(row: dict[str, Any]) -> None:
            milliseconds = [1e3 * row[key] for key in ("seconds_per_step", "fastest", "slowest")]
            table.add_row(
                *(row[key] for key in ("link", "shaping", "path", "chunks")),
                f"{milliseconds[0]:.1f}",
                f"{milliseconds[1]:.1f} … {milliseconds[2]:.1f}",
            )
            progress.advance(task)

        rows = data_plane.bench(links, workers=workers, steps=steps, rounds=rounds, shaping=shaping, on_row=on_row)
    console.print(table)
    write_json(json, {"machine": machine(), "rows": rows})


@app.command(hidden=True)
def data_plane_worker(
    server: Annotated[str, typer.Option()],
    rank: Annotated[int, typer.Option()],
    workers: Annotated[int, typer.Option()],
    steps: Annotated[int, typer.Option()],
    chunk: Annotated[int, typer.Option()],
    path: Annotated[str, typer.Option()],
    shape: options.Shape = None,
    events: options.Events = False,
) -> None:
    """One worker of `bench transports`."""
    connection = connect(server, options=grpc_options(shape))
    report = event if events else lambda data: console.print(data)
    run = data_plane.PATHS[path]
    report(
        {
            "event": "done",
            "rank": rank,
            "seconds_per_step": run(connection, rank=rank, workers=workers, steps=steps, chunk_nbytes=chunk),
        }
    )
