"""`thinwire bench designs`: every design on every model, a few steps each."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from thinwire.bench.designs import jobs, run_model, run_trainings, serve_trainings
from thinwire.cli import options
from thinwire.cli.console import console, event, write_json
from thinwire.errors import EngineError
from thinwire.jobs.results import machine
from thinwire.policies.designs import designs as list_designs
from thinwire.studies.compare import split_names
from thinwire.workloads.models import models as list_models

app = typer.Typer()


@app.command(
    "designs", epilog="Example: thinwire bench designs --models mlp,lenet5 --steps 50 --servers 2 --json designs.json"
)
def bench_designs(
    designs: Annotated[str, typer.Option(help="Designs with commas between; by default all.")] = "",
    models: Annotated[str, typer.Option(help="Models with commas between; by default all.")] = "",
    data: Annotated[str, typer.Option(help="The data set of the models that see images.")] = "digits",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each training.")] = 50,
    workers: options.Workers = 4,
    servers: options.Servers = 2,
    json: options.Json = None,
) -> None:
    """Train every model with every design for a few steps: finished, loss finite, replicas equal?"""
    wanted, on = split_names(designs) or list(list_designs()), split_names(models) or list_models()
    todo = jobs(on, wanted, data=data, steps=steps, workers=workers)
    rows: list[dict[str, Any]] = []
    for model in on:
        console.print(f"{model}, {workers} workers, {servers} servers, {steps} steps")
        mine = [job for job in todo if job.model == model]
        rows += run_model(
            mine, servers=servers, on_row=lambda row: console.print(f"  {row['design']}: {_verdict(row)}")
        )
        write_json(json, {"machine": machine(), "rows": rows})
    console.print(_table(rows, wanted, on))
    if bad := [row for row in rows if _verdict(row) != "ok"]:
        raise EngineError(
            f"{len(bad)} of {len(rows)} failed; {bad[0]['design']} on {bad[0]['model']}: {_verdict(bad[0])}"
        )


def _verdict(row: dict[str, Any]) -> str:
    if row["error"]:
        return escape(row["error"])
    if not row["finite"]:
        return f"loss {row['loss']}"
    return "ok" if row["equal"] in (True, None) else "replicas differ"


def _table(rows: list[dict[str, Any]], designs: list[str], models: list[str]) -> Table:
    """The final loss of each pair that did what it should, or what was wrong."""
    cells = {(row["design"], row["model"]): f"{row['loss']:.3f}" if _verdict(row) == "ok" else "FAILED" for row in rows}
    table = Table("design", *models, title="training loss, mean of the last steps", title_justify="left")
    for design in designs:
        table.add_row(escape(design), *(cells[design, model] for model in models))
    return table


@app.command(hidden=True)
def designs_server(
    trainings: Annotated[int, typer.Option(min=1)],
    listen: Annotated[str, typer.Option()],
    events: options.Events = False,
) -> None:
    """One shard of every training of `bench designs`."""
    serve_trainings(trainings, listen, event if events else console.print)


@app.command(hidden=True)
def designs_worker(
    rank: Annotated[int, typer.Option()],
    workers: Annotated[int, typer.Option()],
    model: Annotated[str, typer.Option()],
    data: Annotated[str, typer.Option()],
    steps: Annotated[int, typer.Option()],
    design: Annotated[list[str], typer.Option()],
    server: Annotated[list[str], typer.Option()],
    events: options.Events = False,
) -> None:
    """One worker of every training of `bench designs`."""
    run_trainings(
        jobs([model], design, data=data, steps=steps, workers=workers),
        rank=rank,
        shards=server,
        report=event if events else console.print,
    )
