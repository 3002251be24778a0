"""`thinwire plan`: predicted seconds of a step with each design, by link and number of workers."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from thinwire.cli import options
from thinwire.cli.console import busy, console, save_picture, show, write_json
from thinwire.cli.lazy import lazily
from thinwire.cli.options import split_names
from thinwire.cli.outputs import STANDARD_OUTPUT, check_apart, picture
from thinwire.errors import ConfigError
from thinwire.extras import require
from thinwire.planner.transport_costs import TransportCosts
from thinwire.quantities import seconds_text

with lazily():
    from thinwire.planner import models, planning, predictions, script, verdict
    from thinwire.policies import adaptive

app = typer.Typer()

STARTUP = Path(__file__).parent / "startup"
STANDARD_ERROR = 2
"""A file descriptor: a script that is run prints without `sys.stderr`."""
LATENCY_MS = 1e3 * TransportCosts().latency_s
DESIGNS = "3lc[s=1.0],3lc[s=1.75],int8,local2"
FOR_ADAPTIVE = "int8,update"


@app.command(
    epilog="Example: thinwire plan --link 50mbit --workers 8 -- torchrun --standalone --nproc-per-node 1 train.py; "
    "thinwire plan --model train:make --link 50mbit --servers 2 --out plan.svg"
)
def plan(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND …]", help="A training script of your own, as it is started."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="A function that returns a model and what makes its next step."),
    ] = None,
    designs: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Designs beside fp32, with commas between; by default such as suit the optimizer. Where that is "
            "adaptive, local-sgd\\[h=4] is planned too.",
        ),
    ] = None,
    link: Annotated[
        str, typer.Option(help="Rate of every process's link, both ways: 10mbit, 1gbit; none.")
    ] = "100mbit",
    workers: options.Workers = 4,
    servers: Annotated[
        int | None, typer.Option(min=1, help="Plan a parameter server of so many shards, in place of equal ranks.")
    ] = None,
    latency_ms: Annotated[float, typer.Option(help="Of a message, in milliseconds.")] = LATENCY_MS,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Processors that all share; by default each its own.")
    ] = None,
    compute: Annotated[float, typer.Option(help="How many times as fast as this machine workers compute.")] = 1.0,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured.")] = 32,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, callback=picture, help="Draw step time by link rate into this file.")
    ] = None,
    json: options.Json = None,
) -> None:
    """Predict the seconds of a step by design, link and workers, and say whether compression pays.

    A few steps and the codecs are measured on this machine, which should do nothing else meanwhile; the cluster is a
    model. Nothing is sent. The first steps of your script are really made, without the exchange of DDP or
    tw.distribute; then the script is ended.
    """
    if out is not None:
        require("the picture of --out", "matplotlib")
    check_apart(json, [out], "the picture is drawn")
    setting = predictions.Setting(
        link=link,
        workers=workers,
        mode="collective" if servers is None else "server",
        servers=servers or 1,
        latency_ms=latency_ms,
        cores=cores,
        compute=compute,
    )
    given = None if designs is None else split_names(designs)
    planning.plannable(given or [])  # before a script has run
    threads = None if cores is None else 1  # processes that share processors have one thread each
    if bool(command) == bool(model):
        raise ConfigError(
            "say what trains, and once: a script, as in thinwire plan -- torchrun --nproc-per-node 1 train.py; or "
            "--model MODULE:FUNCTION, which returns a model and what makes its next step"
        )
    if command:
        printed = STANDARD_ERROR if json == STANDARD_OUTPUT else None  # where the JSON goes, it goes alone
        measured = script.profile_script(command, os.environ, STARTUP, steps=steps, threads=threads, stdout=printed)
    else:
        with busy(f"making {steps} steps of {model}"):
            measured = models.profile_model(str(model), steps=steps, threads=threads)
    suited = FOR_ADAPTIVE if adaptive.is_adaptive_name(measured.trainer.kind) else DESIGNS
    with busy("") as tell:
        made = planning.Plan(
            measured,
            split_names(suited) if given is None else given,
            setting,
            tell=lambda what: tell(f"measuring {what}"),
        )
        said = verdict.verdict(made)
    summaries = [
        # JSON has no infinity: "at any rate" is a field of its own
        msgspec.structs.asdict(each) | {"pays_at_any_rate": each.pays_below_bps == math.inf}
        for each in made.summaries()
    ]
    write_json(  # before anything else is printed: standard output may take nothing
        json,
        {
            **({"command": command} if command else {"model": model}),
            "setting": setting,
            "compute_s": measured.step_s,
            "verdict": said,
            "summaries": summaries,
            "by_workers": made.by_workers(),
            "by_link": made.by_link(),
        },
    )
    what, seconds = model or "the script", seconds_text(measured.step_s)
    console.print(f"measured: a step of {what} computes {seconds} here; all else is predicted")
    show(verdict.designs_table(made))
    show(verdict.workers_table(made))
    for sentence in said:
        console.print(sentence, highlight=False, soft_wrap=True, markup=False)
    if out is not None:
        save_picture(verdict.chart(made), out)
