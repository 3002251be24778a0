"""`thinwire bench race`: which DDP hook reaches a test accuracy first on a thin link, torch's hooks and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from thinwire.bench.charts import draw_race
from thinwire.bench.hooks import Cell
from thinwire.bench.race import RUNNERS, race, standings
from thinwire.cli import options
from thinwire.cli.console import console
from thinwire.cli.hook_runs import RANK_COMMAND, Kept, last_words, progress_bar, rates_of, words
from thinwire.cli.train import with_privileges

app = typer.Typer()


@app.command(
    "race",
    epilog="Example: thinwire bench race --models lenet --links 10mbit --target-accuracy 0.8 --json race.json",
)
def race_command(
    target_accuracy: Annotated[float, typer.Option(min=0, max=1, help="The test accuracy to reach, 0 … 1.")] = 0.8,
    models: options.Models = "lenet",
    names: options.Hooks = None,
    links: options.Links = "10mbit,100mbit",
    data: options.Data = "fashion-mnist",
    ranks: options.Ranks = 4,
    steps: Annotated[int, typer.Option(min=1, help="At most so many; the learning rate's schedule is as long.")] = 1000,
    eval_every: Annotated[int, typer.Option(min=1, help="Steps between evaluations; they are off the clock.")] = 25,
    eval_examples: Annotated[int, typer.Option(min=1, help="Evaluate on the first so many test examples.")] = 2000,
    give_up: Annotated[float, typer.Option(min=1, help="Stop a hook after so many times the best time so far.")] = 3.0,
    seeds: options.Seeds = 1,
    batch: options.Batch = None,
    lr: options.Rate = None,
    seed: options.Seed = 0,
    bucket_cap_mb: options.BucketCap = None,
    data_root: options.DataRoot = None,
    png: Annotated[Path, typer.Option(help="Where to draw accuracy against seconds.")] = Path("thinwire-race.png"),
    json: options.Json = None,
) -> None:
    """Race DDP hooks to a test accuracy: seconds of training, equal seeds, batches and learning rates for all.

    Every finished run is in the JSON file at once. Ctrl-C keeps what has been measured.
    """
    courses = [
        Cell(
            hook="none",
            model=model,
            data=data,
            link=link,
            ranks=ranks,
            steps=steps,
            batch=batch,
            lr=lr,
            eval_every=eval_every,
            eval_examples=eval_examples,
            target=target_accuracy,
            bucket_cap_mb=bucket_cap_mb,
            data_root=data_root,
        )
        for model in words(models)
        for link in rates_of(links)
    ]
    hooks = names or list(RUNNERS)
    for hook in hooks:
        Cell(hook=hook)  # an unknown name is refused now, not after an hour
    with_privileges(next((course.link for course in courses if course.link), None), "kernel")
    outcomes = Kept(json)
    try:
        _run_all(courses, hooks, range(seed, seed + seeds), give_up, outcomes)
    finally:
        _show(outcomes, png, give_up)


def _run_all(courses: list[Cell], hooks: list[str], seeds: range, give_up: float, outcomes: Kept) -> None:
    with progress_bar() as bar:
        whole = bar.add_task("all runs", total=len(courses) * len(hooks) * len(seeds), text="")
        for course in courses:
            task = bar.add_task(f"{course.model} {course.link or 'unlimited'}", total=course.steps, text="starting")
            score = ""

            def on_event(_process: str, data: dict[str, Any], task: Any = task) -> None:
                nonlocal score
                if data["event"] == "score":
                    score = f", accuracy {data['accuracy']:.1%}"
                if data["event"] == "progress":
                    score = score if data["step"] > 1 else ""
                    bar.update(task, completed=data["step"], text=f"{data['seconds']:.1f} s of training{score}")

            for outcome in race(course, hooks, seeds, RANK_COMMAND, give_up=give_up, on_event=on_event):
                outcomes.add(outcome, standings=standings([*outcomes.rows, outcome]))
                where = f"{outcome['model']}, {outcome['link'] or 'unlimited'}, seed {outcome['seed']}"
                console.print(escape(f"{where}, {outcome['hook']}: {_in_words(outcome, give_up)}"), highlight=False)
                bar.advance(whole)


def _in_words(outcome: dict[str, Any], give_up: float) -> str:
    seconds = outcome["seconds"]
    return {
        "target": f"target after {outcome['seconds_to_target'] or 0:.1f} s and {outcome['steps_done']} steps",
        "limit": f"stopped after {seconds:.1f} s, more than {give_up:g}× the best",
        "steps": f"target not reached in {outcome['steps_done']} steps, {seconds:.1f} s",
        "error": f"failed after {outcome['steps_done']} steps: {last_words(outcome['error'] or '')}",
    }[outcome["ended"]]


def _show(outcomes: Kept, png: Path, give_up: float) -> None:
    rows = standings(outcomes.rows)
    for model, link in dict.fromkeys((row["model"], row["link"]) for row in rows):
        first = next(row for row in outcomes.rows if row["model"] == model)
        title = f"{model} on {first['data']}, {first['ranks']} ranks, {link or 'unlimited'}: {first['target']:.1%}"
        table = Table(title=title, title_justify="left")
        for column in ("hook", "seconds by seed", "steps by seed", "median s", "of best stock"):
            table.add_column(column, justify="left" if column == "hook" else "right")
        for row in rows:
            if (row["model"], row["link"]) == (model, link):
                table.add_row(*_cells(row, give_up))
        console.print(table)
    outcomes.tell()
    if measured := [outcome for outcome in outcomes.rows if outcome["curve"]]:
        draw_race(measured, png)
        console.print(f"wrote {png}")


def _cells(row: dict[str, Any], give_up: float) -> tuple[str, ...]:
    """A row of the table; `>` is a lower bound, of a run that was stopped or did not reach the target."""

    def seconds(seed: int) -> str:
        ended, trained = row["ended"][seed], row["trained_seconds"][seed]
        if ended == "target":
            return f"{row['seconds'][seed]:.1f}"
        if ended == "error":
            return "failed"
        return f"> {trained:.1f} " + (f"(stopped at {give_up:g}×)" if ended == "limit" else "(not reached)")

    median, share = row["median_seconds"], row["of_best_stock"]
    return (
        escape(row["hook"]),
        ", ".join(map(seconds, row["ended"])),
        ", ".join("–" if step is None else str(step) for step in row["steps"].values()),
        "" if median is None else f"{median:.1f}",
        "" if share is None else f"{share:.2f}",
    )
