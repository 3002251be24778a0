"""`thinwire demo`: two designs side by side on real data over a thin link, in two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli import options
from thinwire.cli.console import console, save_picture, show, write_json
from thinwire.cli.lazy import lazy
from thinwire.cli.outputs import check_apart
from thinwire.cli.privileges import with_privileges
from thinwire.extras import require

if TYPE_CHECKING:
    from thinwire.cli import running
    from thinwire.jobs import job as job_module
    from thinwire.studies import compare_page
else:
    running = lazy("thinwire.cli.running")
    job_module, compare_page = lazy("thinwire.jobs.job"), lazy("thinwire.studies.compare_page")

app = typer.Typer()

DESIGNS = ("fp32", "3lc[s=1.0]")


@app.command(epilog="Example: thinwire demo --seconds 20 --link 100mbit --json demo.json")
def demo(
    seconds: Annotated[float, typer.Option(min=1.0, help="Time budget of each design.")] = 40.0,
    link: Annotated[str, typer.Option(help="Rate of every process's link.")] = "10mbit",
    workers: options.Workers = 4,
    model: options.Model = "mlp",
    data: options.Data = "digits",
    seed: options.Seed = 0,
    shaping: options.Shaping = "auto",
    png: options.Png = Path("thinwire-demo.png"),
    json: options.Json = None,
) -> None:
    """Train digits twice over a thin link, uncompressed and with 3LC, each in the same time."""
    check_apart(json, [png], "the picture is drawn")
    if png is not None:
        require("the picture of --png", "matplotlib")
    jobs = [
        job_module.Job(
            design=design,
            model=model,
            data=data,
            workers=workers,
            seconds=seconds,
            link=link,
            seed=seed,
            eval_every=max(0.5, seconds / 40),
        )
        for design in DESIGNS
    ]
    with_privileges(link, shaping)
    console.print(
        f"{workers} workers and 1 server train {model} on {data}; every link carries {link}; {seconds:g} s a design"
    )
    runs = [running.run_with_progress(job, shaping) for job in jobs]
    speedup = runs[0].seconds_per_step / runs[1].seconds_per_step
    show(running.runs_table(runs, f"{seconds:g} seconds each"))
    write_json(json, {"runs": runs, "speedup": speedup})
    if png is not None:
        save_picture(compare_page.curves(runs, f"{model} on {data}, {workers} workers, {link} links"), png)
