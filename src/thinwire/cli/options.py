"""The options that several commands share, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Design = Annotated[str, typer.Option(help="A design, options in brackets: 3lc[s=1.75,entropy=zstd], int8, fp32.")]
Model = Annotated[str, typer.Option(help="A model's name; `thinwire inspect models` lists them.")]
Models = Annotated[str, typer.Option(help="Models with commas between; `thinwire inspect models` lists them.")]
Data = Annotated[str, typer.Option(help="A data set's name; `thinwire inspect data` lists them.")]
DataRoot = Annotated[str | None, typer.Option(help="Where the data set lies, if not in its usual place.")]
Workers = Annotated[int, typer.Option(min=1, help="How many workers train together.")]
Steps = Annotated[int | None, typer.Option(min=1, help="How many steps; by default the recipe's.")]
Seconds = Annotated[float | None, typer.Option(help="A time budget in place of a number of steps.")]
Seed = Annotated[int, typer.Option(help="Of weights, batches and random codecs; one seed, one result.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many runs of each, each with a seed of its own.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Examples per worker and step; by default the recipe's.")]
Rate = Annotated[float | None, typer.Option("--lr", help="Largest learning rate; by default the recipe's.")]
EvalEvery = Annotated[float, typer.Option(help="Seconds between evaluations during the run; 0: only at the end.")]
Link = Annotated[str | None, typer.Option(help="Rate of every process's link, both ways: 10mbit, 1gbit; none.")]
Links = Annotated[str, typer.Option(help="Rates of every process's link, with commas between; none: no limit.")]
Shaping = Annotated[str, typer.Option(help="Who makes the link thin: auto, kernel (tc) or application.")]
Json = Annotated[
    Path | None,
    typer.Option("--json", dir_okay=False, writable=True, help="Write what was printed as data, to this file."),
]
Shape = Annotated[str | None, typer.Option(help="Shape this process's traffic inside its transport: a rate.")]
Events = Annotated[bool, typer.Option("--events", help="Report in JSON lines on standard output.")]
Servers = Annotated[int, typer.Option(min=1, help="How many server shards hold the model, each a process.")]
Ranks = Annotated[int, typer.Option(min=2, help="How many ranks train together.")]
Hooks = Annotated[
    list[str] | None,
    typer.Option(
        "--hook",
        help="none, fp16, bf16, powersgd-N, or a codec as in 3lc[s=1.75]; with start_step=50 in the brackets the steps "
        "before it travel uncompressed. Repeat for several.",
    ),
]
BucketCap = Annotated[int | None, typer.Option(help="DDP's bucket size; by default DDP's own, and 100 for PowerSGD.")]
CodecUp = Annotated[
    str | None, typer.Option(help="Codec of the pushes, in place of the design's: topk[fraction=0.01].")
]
CodecDown = Annotated[str | None, typer.Option(help="Codec of the pulls, in place of the design's.")]
Consistency = Annotated[
    str | None, typer.Option(help="bsp, asp, ssp[staleness=5], backup[1], local[2], adaptive[norm,threshold=0.01].")
]
Placement = Annotated[str | None, typer.Option(help="heuristic, greedy, round-robin, uniform[min=1024].")]
Compression = Annotated[
    str | None, typer.Option(help="Which tensor takes which codec: by-shape, or an installed policy.")
]
ServersOnWorkers = Annotated[
    bool, typer.Option("--servers-on-workers", help="A server shard on every worker's node, behind the same link.")
]
Transmission = Annotated[str | None, typer.Option(help="wait-free (layer by layer) or traditional (all at once).")]
Telemetry = Annotated[Path | None, typer.Option(help="Append a JSON line per table and step to this file.")]
MetricsPort = Annotated[int | None, typer.Option(help="Serve Prometheus metrics of worker 0 on this port.")]
TensorBoard = Annotated[Path | None, typer.Option(help="Write TensorBoard events of worker 0 to this folder.")]
Checkpoint = Annotated[
    Path | None, typer.Option(dir_okay=False, help="Write a checkpoint to this file; the one before stays beside it.")
]
CheckpointEvery = Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint.")]
ResumeStep = Annotated[int | None, typer.Option(min=1, help="Which of the two checkpoints; by default the newest.")]
CheckpointDir = Annotated[
    Path | None, typer.Option(file_okay=False, help="Write checkpoints of every process to this folder.")
]
