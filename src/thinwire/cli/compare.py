"""`thinwire compare`: many designs on many links, as a table, a file of results and a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from thinwire.cli import options
from thinwire.cli.console import console, write_json
from thinwire.cli.train import run_with_progress, with_privileges
from thinwire.engines.links import parse_rate
from thinwire.errors import ConfigError, EngineError
from thinwire.jobs.job import Job
from thinwire.jobs.run import choose_links
from thinwire.studies.compare import SHORT_STEPS, Comparison, split_names
from thinwire.studies.compare import compare as measure
from thinwire.studies.report import choices, designs_table, servers_of, times_table, write_report

app = typer.Typer()

Designs = Annotated[str, typer.Option(help="Designs with commas between; the first is what others are held against.")]
Short = Annotated[int, typer.Option(min=2, help="Steps of a run that only measures seconds per step.")]
InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process",
        help="Full runs, which accuracies come from, in one process: the same weights for less work, and untimed.",
    ),
]
Out = Annotated[Path, typer.Option(file_okay=False, help="Folder of results.json and report.html.")]


@app.command(
    epilog="Example: thinwire compare --designs 'fp32,int8,3lc[s=1.0],3lc[s=1.75]' --links 10mbit,100mbit,1gbit "
    "--models lenet5 --data fashion-mnist --seeds 3 --out out/lenet5"
)
def compare(
    designs: Designs = "fp32,int8,3lc[s=1.0],3lc[s=1.75]",
    links: options.Links = "10mbit,100mbit,1gbit",
    models: options.Models = "mlp",
    data: options.Data = "digits",
    seeds: options.Seeds = 1,
    workers: options.Workers = 4,
    servers: options.Servers = 1,
    servers_on_workers: options.ServersOnWorkers = False,
    steps: options.Steps = None,
    short_steps: Short = SHORT_STEPS,
    batch: options.Batch = None,
    lr: options.Rate = None,
    consistency: options.Consistency = None,
    placement: options.Placement = None,
    compression: options.Compression = None,
    transmission: options.Transmission = None,
    data_root: options.DataRoot = None,
    shaping: options.Shaping = "auto",
    in_process: InProcess = False,
    out: Out = Path("thinwire-compare"),
    json: options.Json = None,
) -> None:
    """Compare designs on links: accuracy from full runs, seconds per step from short runs on every link.

    Runs that are in results.json already are not made again, so a comparison that was interrupted goes on, and one
    that was finished can grow.
    """
    comparison = Comparison(
        designs=split_names(designs),
        links=split_names(links),
        models=split_names(models),
        data=data,
        seeds=seeds,
        workers=workers,
        servers=servers,
        servers_on_workers=servers_on_workers,
        steps=steps,
        short_steps=short_steps,
        batch=batch,
        lr=lr,
        consistency=consistency,
        placement=placement,
        compression=compression,
        transmission=transmission,
        data_root=data_root,
        shaping=shaping,
        in_process=in_process,
    )
    thin = [link for link in comparison.links if parse_rate(link).bps is not None]
    with_privileges(thin[0] if thin else None, shaping)
    if servers_on_workers and thin and choose_links(thin[0], shaping).shaping == "application":
        raise ConfigError("--servers-on-workers: processes of one node share its link only with kernel shaping")
    try:
        results = measure(
            comparison,
            out,
            lambda job: run_with_progress(job, shaping, in_process=in_process and job.link is None),
            on_job=_announce,
        )
    except KeyboardInterrupt:
        console.print(
            f"what is done is kept in {escape(str(out / 'results.json'))}; the same command goes on from there"
        )
        raise
    told = results["comparison"]
    console.print(escape(", ".join(filter(None, [f"servers: {servers_of(told)}", choices(told)]))), highlight=False)
    for model in comparison.models:
        rows = [row for row in results["rows"] if row["model"] == model]
        console.print(_table(*designs_table(rows), title=f"{model} on {data}, {workers} workers, seeds: {seeds}"))
        console.print(_table(*times_table(rows)))
    write_report(results, out / "report.html")
    console.print(f"wrote {out / 'results.json'} and {out / 'report.html'}", soft_wrap=True)
    write_json(json, results)
    if failures := results["failures"]:
        raise EngineError(
            f"{len(failures)} runs failed; the same command tries them again. "
            f"The first, {failures[0]['job']['design']}: {failures[0]['error']}"
        )


def _announce(number: int, total: int, job: Job) -> None:
    link = job.link or "no limit"
    console.print(f"{number}/{total}  {escape(job.design)}, {job.model}, {link}, seed {job.seed}, {job.steps} steps")


def _table(header: list[str], lines: list[list[str]], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for line in lines:
        table.add_row(*map(escape, line))
    return table
