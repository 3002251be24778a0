"""`thinwire bench hooks`: DDP hooks side by side, torch's and ours, over thin links."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from thinwire.cli import options
from thinwire.cli.console import console, event, size, write_json
from thinwire.cli.train import with_privileges
from thinwire.errors import ConfigError
from thinwire.studies.hooks_bench import NOTES, OURS, STOCK, Cell, run_cell
from thinwire.studies.hooks_bench_chart import draw_hooks

app = typer.Typer()
RANK_COMMAND = (sys.executable, "-m", "thinwire.cli.bench_hooks", "hooks-rank")


@app.command(
    "hooks",
    epilog="Example: thinwire bench hooks --models lenet --links 10mbit,100mbit --hook none --hook '3lc[s=1.75]' "
    "--json out.json",
)
def hooks(
    models: Annotated[str, typer.Option(help="Models, with commas.")] = "lenet,resnet20,mlp-5m",
    names: Annotated[
        list[str] | None,
        typer.Option("--hook", help="none, fp16, bf16, powersgd-N, or a codec as in 3lc[s=1.75]; repeat for several."),
    ] = None,
    links: Annotated[str, typer.Option(help="Rates of every rank's link, with commas.")] = "10mbit,100mbit,1gbit,none",
    data: options.Data = "fashion-mnist",
    ranks: Annotated[int, typer.Option(min=2, help="How many ranks train together.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each run.")] = 20,
    batch: options.Batch = None,
    lr: options.Rate = None,
    target: Annotated[float | None, typer.Option(help="Also measure the time to this test accuracy, 0 … 1.")] = None,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; they are off the clock.")] = 0,
    seed: options.Seed = 0,
    bucket_cap_mb: Annotated[
        int | None, typer.Option(help="DDP's bucket size; by default DDP's own, and 100 for PowerSGD.")
    ] = None,
    data_root: options.DataRoot = None,
    png: Annotated[Path, typer.Option(help="Where to draw the figures.")] = Path("thinwire-hooks.png"),
    json: options.Json = None,
) -> None:
    """Measure DDP hooks: seconds per step, bytes at the interface, and time to a test accuracy."""
    wanted = names or [*STOCK, *OURS]
    rates = [None if word in ("none", "unlimited") else word for word in _words(links)]
    cells = [
        Cell(
            hook=hook,
            model=model,
            data=data,
            link=link,
            ranks=ranks,
            steps=steps,
            batch=batch,
            lr=lr,
            seed=seed,
            eval_every=eval_every,
            target=target,
            bucket_cap_mb=bucket_cap_mb,
            data_root=data_root,
        )
        for model in _words(models)
        for link in rates
        for hook in wanted
    ]
    with_privileges(next((link for link in rates if link), None), "kernel")
    outcomes = _run_all(cells)
    for model in dict.fromkeys(cell.model for cell in cells):
        console.print(_table([outcome for outcome in outcomes if outcome["model"] == model], model))
    for name in wanted:
        if name in NOTES:
            console.print(f"{name}: {NOTES[name]}", highlight=False)
    draw_hooks(outcomes, png)
    console.print(f"wrote {png}")
    write_json(json, {"cells": outcomes})


@app.command("hooks-rank", hidden=True)
def hooks_rank(
    cell: Annotated[str, typer.Option(help="A cell, as JSON.")],
    rank: Annotated[int, typer.Option(min=0)],
    master: Annotated[str, typer.Option(help="Host and port of rank 0.")],
    gate: Annotated[Path, typer.Option(help="A folder through which the launcher says when to go on.")],
) -> None:
    """One rank of a measurement; `hooks` starts it."""
    from thinwire.studies.hooks_bench_rank import run_rank  # loads torch's hooks: only ranks need them

    run_rank(Cell(**json_format.loads(cell)), rank=rank, master=master, gate=gate, report=event)


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"{text!r} names nothing; give names with commas")
    return words


def _run_all(cells: list[Cell]) -> list[dict[str, Any]]:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        console=console,
    )
    outcomes = []
    with bar:
        whole = bar.add_task("all runs", total=len(cells), text="")
        for cell in cells:
            name = escape(f"{cell.model} {cell.link or 'unlimited'} {cell.hook}")
            task = bar.add_task(name, total=cell.steps, text="starting")

            def on_event(_process: str, data: dict[str, Any], task: Any = task) -> None:
                if data["event"] == "progress":
                    each = data["seconds"] / data["step"]
                    bar.update(task, completed=data["step"], text=f"{1e3 * each:.0f} ms a step")

            outcome = run_cell(cell, RANK_COMMAND, on_event=on_event)
            outcomes.append(outcome)
            bar.update(task, completed=cell.steps, text=f"median {1e3 * outcome['seconds_per_step']:.1f} ms")
            bar.advance(whole)
    return outcomes


def _table(outcomes: list[dict[str, Any]], model: str) -> Table:
    """A row for each link and hook, per step and rank.

    The speed-up is over plain DDP on the same link, where that was run; `target` is the time to the target accuracy.
    """
    table = Table(title=f"{model}, {outcomes[0]['ranks']} ranks, {outcomes[0]['data']}", title_justify="left")
    for column in ("link", "hook", "step ms", "speed-up", "CPU ms", "sent", "accuracy", "target s"):
        table.add_column(column, justify="left" if column in ("link", "hook") else "right", no_wrap=column != "hook")
    plain = {o["link"]: o["seconds_per_step"] for o in outcomes if o["hook"] == "none"}
    for outcome in outcomes:
        sent, reached = outcome["sent_bytes_per_step"], outcome["seconds_to_target"]
        base = plain.get(outcome["link"])
        table.add_row(
            outcome["link"] or "unlimited",
            escape(outcome["hook"]),
            f"{1e3 * outcome['seconds_per_step']:.1f}",
            f"{base / outcome['seconds_per_step']:.1f}×" if base else "",
            f"{1e3 * outcome['cpu_seconds_per_step']:.1f}",
            size(sent) if sent is not None else "not counted",
            f"{outcome['test_accuracy']:.2%}",
            f"{reached:.1f}" if reached is not None else ("" if outcome["target"] is None else "not reached"),
        )
    return table


if __name__ == "__main__":
    app()
