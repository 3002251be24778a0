"""The options of `thinwire bench`'s commands that the others do not have, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.outputs import writable
from thinwire_lab.cli import options

Resume = Annotated[bool, typer.Option("--resume", help="Keep what the --json file holds, and measure the rest.")]
Device = Annotated[str, typer.Option(help="cpu, or cuda (cuda:1, …): the GPU kernels, on the device's clock.")]
Place = Annotated[str, typer.Option(help="Where all ranks train: cpu, or cuda (cuda:1, …), a GPU that they share.")]
Counts = Annotated[list[int], typer.Option(min=1, help="How many workers; repeat for several.")]
AllDesigns = options.names("Designs with commas between; by default all.")
SomeModels = options.names("Models with commas between.")
LocalDesigns = options.names("Designs of local updates with commas between.")
Links = options.names("Rates of every link, with commas between.")
Steps = Annotated[int, typer.Option(min=1, help="Measured steps of each run.")]
BlockSteps = Annotated[int, typer.Option(min=1, help="Steps of a block; more where a design's rounds need them.")]
Blocks = Annotated[int, typer.Option(min=1, help="Blocks of steps of each way to train, in turn.")]
AllSteps = Annotated[int, typer.Option(min=1, help="Steps of the whole training, which the loss comes from.")]
ThinSteps = Annotated[int, typer.Option(min=1, help="How many of them run on thin links, and are timed.")]
Sharded = options.many(
    r"hsdp:METHOD, two sites of two ranks, or fsdp:METHOD, four ranks; a method is none, or a codec as in 3lc\[s=1.0], "
    "with gather=int8 in the brackets the parameters are coded too.",
    "--hook",
)
MemoryMethods = options.many(
    r"alone, a hook or a design as of `bench hooks`, and fsdp:METHOD or hsdp:METHOD as of `bench fsdp`.", "--hook"
)
Layers = Annotated[list[int], typer.Option(min=1, help="Of the two models, a million parameters each; give it twice.")]
MaxSteps = Annotated[int, typer.Option(min=1, help="At most so many; the learning rate's schedule is as long.")]
EvalEvery = Annotated[
    int | None, typer.Option(min=1, help="Steps between evaluations, off the clock; by default 25, of text 50.")
]
EvalExamples = Annotated[
    int | None,
    typer.Option(min=1, help="Evaluate on the first so many test examples; of text on so many windows, evenly spaced."),
]
Racers = Annotated[
    list[str] | None,
    typer.Option(
        help=r"As for `bench hooks`; of text also a design of local updates, as in diloco\[h=30], Repeat for several."
    ),
]
Rates = Annotated[
    str | None,
    typer.Option(metavar="RATES", help="Of text: learning rates to try each method with, commas between."),
]
TimedSteps = Annotated[int, typer.Option(min=1, help="Of text: steps on each link, which seconds per step come from.")]
TimedSeconds = Annotated[
    float,
    typer.Option(min=0, help="Of text: end a run on a link after so many seconds; local updates after a whole period."),
]
Methods = options.many(
    r"As for `bench hooks`; server:DESIGN is a parameter server, local-sgd\[h=4] and its kin are local updates.",
    "--hook",
)
LinkSeconds = Annotated[float, typer.Option(min=0.1, help="How long a method trains at each link, about.")]
Cores = Annotated[
    int | None, typer.Option(min=1, help="Processors that the prediction has; by default this machine's.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Two models, three links and fewer methods, where not given.")]
Markdown = Annotated[
    Path | None, typer.Option(dir_okay=False, callback=writable, help="Write the tables as Markdown, to this file.")
]
Margin = Annotated[float, typer.Option(min=0, help="Of text: the target is the loss of `none` plus so many nats.")]
