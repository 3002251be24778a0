"""`thinwire demo`: two designs side by side on real data over a thin link, in two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.console import console, save_picture, show, write_json
from thinwire.cli.lazy import lazily
from thinwire.cli.options import was_given
from thinwire.cli.outputs import check_apart
from thinwire.errors import ConfigError
from thinwire.extras import require
from thinwire.quantities import counted
from thinwire_lab.cli import options
from thinwire_lab.engines.system_tools import with_privileges

with lazily():
    from thinwire_lab.cli import running
    from thinwire_lab.jobs import job as job_module
    from thinwire_lab.studies import compare_page

app = typer.Typer()

DESIGNS = ("fp32", "3lc[s=1.0]")


@app.command(epilog="Example: thinwire demo --seconds 20 --link 100mbit --json demo.json")
def demo(
    context: typer.Context,
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
        try:
            require("the picture of --png", "matplotlib")
        except ConfigError as error:
            if was_given(context, "png"):
                raise
            console.print(f"no picture: {error}", markup=False, highlight=False, soft_wrap=True)
            png = None
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
    group = counted(workers, "worker")
    console.print(f"{group} and 1 server train {model} on {data}; every link carries {link}; {seconds:g} s a design")
    runs = [running.run_with_progress(job, shaping) for job in jobs]
    speedup = runs[0].seconds_per_step / runs[1].seconds_per_step
    write_json(json, {"runs": runs, "speedup": speedup})
    show(running.runs_table(runs, f"{seconds:g} seconds each"))
    if png is not None:
        title = f"{model} on {data}, {group}, {link} links"
        save_picture(compare_page.curves(runs, title), png)
