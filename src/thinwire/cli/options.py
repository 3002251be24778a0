"""The options that several commands share, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Design = Annotated[str, typer.Option(help="A design, options in brackets: 3lc[s=1.75,entropy=zstd], int8, fp32.")]
Model = Annotated[str, typer.Option(help="A model's name; `thinwire inspect models` lists them.")]
Data = Annotated[str, typer.Option(help="A data set's name; `thinwire inspect data` lists them.")]
DataRoot = Annotated[str | None, typer.Option(help="Where the data set lies, if not in its usual place.")]
Workers = Annotated[int, typer.Option(min=1, help="How many workers train together.")]
Steps = Annotated[int | None, typer.Option(min=1, help="How many steps; by default the recipe's.")]
Seconds = Annotated[float | None, typer.Option(help="A time budget in place of a number of steps.")]
Seed = Annotated[int, typer.Option(help="Of weights, batches and random codecs; one seed, one result.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Examples per worker and step; by default the recipe's.")]
Rate = Annotated[float | None, typer.Option("--lr", help="Largest learning rate; by default the recipe's.")]
EvalEvery = Annotated[float, typer.Option(help="Seconds between evaluations during the run; 0: only at the end.")]
Link = Annotated[str | None, typer.Option(help="Rate of every process's link, both ways: 10mbit, 1gbit; none.")]
Shaping = Annotated[str, typer.Option(help="Who makes the link thin: auto, kernel (tc) or application.")]
Json = Annotated[
    Path | None,
    typer.Option("--json", dir_okay=False, writable=True, help="Write what was printed as data, to this file."),
]
Shape = Annotated[str | None, typer.Option(help="Shape this process's traffic inside its transport: a rate.")]
Events = Annotated[bool, typer.Option("--events", help="Report in JSON lines on standard output.")]
