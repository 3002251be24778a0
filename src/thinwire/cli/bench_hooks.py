"""`thinwire bench hooks`: DDP hooks side by side, torch's and ours, over thin links."""

from __future__ import annotations

import json as json_format
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from thinwire.bench.charts import draw_hooks
from thinwire.bench.hook_names import OURS, STOCK
from thinwire.bench.hooks import Cell, attempt
from thinwire.cli import options
from thinwire.cli.console import console, event, size
from thinwire.cli.hook_runs import RANK_COMMAND, Kept, progress_bar, rates_of, words
from thinwire.cli.train import with_privileges

app = typer.Typer()


@app.command(
    "hooks",
    epilog="Example: thinwire bench hooks --models lenet --links 10mbit,100mbit --hook none --hook '3lc[s=1.75]' "
    "--json out.json",
)
def hooks(
    models: options.Models = "lenet,resnet20,mlp-5m",
    names: options.Hooks = None,
    links: options.Links = "10mbit,100mbit,1gbit,none",
    data: options.Data = "fashion-mnist",
    ranks: options.Ranks = 4,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each run.")] = 20,
    batch: options.Batch = None,
    lr: options.Rate = None,
    seeds: options.Seeds = 1,
    seed: options.Seed = 0,
    bucket_cap_mb: options.BucketCap = None,
    data_root: options.DataRoot = None,
    png: Annotated[Path, typer.Option(help="Where to draw the figures.")] = Path("thinwire-hooks.png"),
    json: options.Json = None,
) -> None:
    """Measure DDP hooks: seconds per step, CPU time and bytes at the interface.

    Every finished run is in the JSON file at once; a hook that fails gives a row that says so, and the rest goes on.
    Ctrl-C keeps what has been measured. See `bench race` for the time to a test accuracy.
    """
    wanted = names or [*STOCK, *OURS]
    rates = rates_of(links)
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
            seed=each,
            bucket_cap_mb=bucket_cap_mb,
            data_root=data_root,
        )
        for model in words(models)
        for link in rates
        for each in range(seed, seed + seeds)
        for hook in wanted
    ]
    with_privileges(next((link for link in rates if link), None), "kernel")
    outcomes = Kept(json)
    try:
        _run_all(cells, outcomes)
    finally:
        _show(outcomes, png)


@app.command("hooks-rank", hidden=True)
def hooks_rank(
    cell: Annotated[str, typer.Option(help="A cell, as JSON.")],
    rank: Annotated[int, typer.Option(min=0)],
    master: Annotated[str, typer.Option(help="Host and port of rank 0.")],
    gate: Annotated[Path, typer.Option(help="A folder through which the launcher says when to go on.")],
) -> None:
    """One rank of a measurement; `hooks` starts it."""
    from thinwire.bench.rank import run_rank  # loads torch's hooks: only ranks need them

    run_rank(Cell(**json_format.loads(cell)), rank=rank, master=master, gate=gate, report=event)


def _show(outcomes: Kept, png: Path) -> None:
    for model in dict.fromkeys(row["model"] for row in outcomes.rows):
        console.print(_table([row for row in outcomes.rows if row["model"] == model], model))
    outcomes.tell()
    if measured := [row for row in outcomes.rows if row["error"] is None]:
        draw_hooks(measured, png)
        console.print(f"wrote {png}")


def _run_all(cells: list[Cell], outcomes: Kept) -> None:
    with progress_bar() as bar:
        whole = bar.add_task("all runs", total=len(cells), text="")
        for cell in cells:
            name = escape(f"{cell.model} {cell.link or 'unlimited'} {cell.hook}")
            task = bar.add_task(name, total=cell.steps, text="starting")

            def on_event(_process: str, data: dict[str, Any], task: Any = task) -> None:
                if data["event"] == "progress":
                    each = data["seconds"] / data["step"]
                    bar.update(task, completed=data["step"], text=f"{1e3 * each:.0f} ms a step")

            outcome = attempt(cell, RANK_COMMAND, on_event=on_event)
            outcomes.add(outcome)
            failed = outcome["error"] is not None
            text = "[red]failed[/]" if failed else f"median {1e3 * outcome['seconds_per_step']:.1f} ms"
            bar.update(task, completed=cell.steps, text=text)
            bar.advance(whole)


def _table(outcomes: list[dict[str, Any]], model: str) -> Table:
    """A row for each link and hook, per step and rank, medians over the seeds; accuracies of all seeds.

    The speed-up is over plain DDP on the same link, where that was run; `added` is CPU time beyond that of the same
    steps without any exchange.
    """
    table = Table(title=f"{model}, {outcomes[0]['ranks']} ranks, {outcomes[0]['data']}", title_justify="left")
    for column in ("link", "hook", "step ms", "speed-up", "CPU ms", "added", "sent", "accuracy"):
        table.add_column(column, justify="left" if column in ("link", "hook") else "right", no_wrap=column != "hook")
    rows: dict[tuple[str | None, str], list[dict[str, Any]]] = {}
    for outcome in outcomes:
        measured = rows.setdefault((outcome["link"], outcome["hook"]), [])
        if outcome["error"] is None:
            measured.append(outcome)
    for (link, hook), measured in rows.items():
        titles = link or "unlimited", escape(hook)
        if not measured:
            table.add_row(*titles, "failed", *[""] * 5)
            continue
        step, base = (_median(each, "seconds_per_step") for each in (measured, rows.get((link, "none"), [])))
        cpu, alone = (_median(measured, key) for key in ("cpu_seconds_per_step", "cpu_seconds_alone"))
        sent = measured[0]["sent_bytes_per_step"]
        table.add_row(
            *titles,
            f"{1e3 * step:.1f}",
            f"{base / step:.1f}×" if base else "",
            f"{1e3 * cpu:.1f}",
            f"{1e3 * (cpu - alone):.1f}",
            size(sent) if sent is not None else "not counted",
            ", ".join(f"{outcome['test_accuracy']:.2%}" for outcome in measured),
        )
    return table


def _median(outcomes: list[dict[str, Any]], key: str) -> float:
    return statistics.median(outcome[key] for outcome in outcomes) if outcomes else 0.0


if __name__ == "__main__":
    app()
