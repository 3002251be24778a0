"""The options of the lab's commands; `takes` makes a command's options from the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from thinwire.cli.options import CHECKPOINT_EVERY as CHECKPOINT_EVERY
from thinwire.cli.options import Checkpoint as Checkpoint
from thinwire.cli.options import CheckpointEvery as CheckpointEvery
from thinwire.cli.options import Events as Events
from thinwire.cli.options import Insecure as Insecure
from thinwire.cli.options import Json as Json
from thinwire.cli.options import MinWorkers as MinWorkers
from thinwire.cli.options import Resume as Resume
from thinwire.cli.options import Shape as Shape
from thinwire.cli.options import TlsCa as TlsCa
from thinwire.cli.options import TlsCert as TlsCert
from thinwire.cli.options import TlsKey as TlsKey
from thinwire.cli.options import TokenFile as TokenFile
from thinwire.cli.options import WorkerGrace as WorkerGrace
from thinwire.cli.options import Workers as Workers
from thinwire.cli.options import split_names
from thinwire.cli.outputs import picture
from thinwire.errors import ConfigError


def names(about: str, *declarations: str) -> Any:
    """Returns an option of names with commas between them, which `takes` splits."""
    return Annotated[str, typer.Option(*declarations, metavar="NAMES", help=about)]


def many(about: str, *declarations: str) -> Any:
    """Returns an option that may be repeated."""
    return Annotated[list[str], typer.Option(*declarations, help=f"{about} Repeat for several.")]


ResumeAll = Annotated[bool, typer.Option("--resume", help="Continue from the newest step of all processes.")]
ResumeGrid = Annotated[bool, typer.Option("--resume", help="Keep the --json file's results, and measure the rest.")]
Shaping = Annotated[str, typer.Option(help="Component that shapes the links: auto, kernel (tc) or application.")]
Telemetry = Annotated[Path | None, typer.Option(help="Append a JSON line per table and step to this file.")]
MetricsPort = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Serve Prometheus metrics of worker 0 on this port.")
]
TensorBoard = Annotated[Path | None, typer.Option(help="Write TensorBoard events of worker 0 to this folder.")]
CheckpointDir = Annotated[
    Path | None, typer.Option(file_okay=False, help="Write checkpoints of every process to this folder.")
]
Png = Annotated[Path | None, typer.Option(dir_okay=False, callback=picture, help="Draw a picture into this file.")]
Model = Annotated[str, typer.Option(help="A model's name; `thinwire inspect models` lists them.")]
Data = Annotated[str, typer.Option(help="A data set's name; `thinwire inspect data` lists them.")]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of weights, batches and random codecs.")]
Place = Annotated[str, typer.Option(help="Where all ranks train: cpu, or cuda (cuda:1, …), a GPU that they share.")]
LINK = "Rate of every process's link, both ways: 10mbit, 1gbit; none."
Steps = Annotated[int, typer.Option(min=1, help="Measured steps of each run.")]

OPTIONS: dict[str, Any] = {
    # a training
    "design": typer.Option(help=r"A design, options in brackets: 3lc\[s=1.75,entropy=zstd], int8, fp32."),
    "designs": names("Designs with commas between; the first is the baseline."),
    "model": Model,
    "models": names("Models with commas between; `thinwire inspect models` lists them."),
    "data": typer.Option(help="A data set's name; `thinwire inspect data` lists them."),
    "workers": Workers,
    "ranks": typer.Option(min=2, help="How many ranks train together."),
    "steps": typer.Option(min=1, help="How many steps; by default the recipe's."),
    "seconds": typer.Option(help="A time budget in place of a number of steps."),
    "link": typer.Option(help=LINK),
    "links": names("Rates of every process's link, with commas between; none: no limit."),
    "shaping": Shaping,
    "seed": Seed,
    "seeds": typer.Option(min=1, help="Number of runs of each, with different seeds."),
    "batch": typer.Option(min=1, help="Examples per worker and step; by default the recipe's."),
    "lr": typer.Option(help="Largest learning rate; by default the recipe's."),
    "final": typer.Option(help="Last learning rate as a share of the largest; by default the recipe's."),
    "schedule": typer.Option(
        help="cosine, linear, polynomial, exponential, step or constant; by default the recipe's."
    ),
    "optimizer": typer.Option(help="SGD, Adam or AdamW; by default the recipe's."),
    "momentum": typer.Option(help="SGD's momentum; by default the recipe's."),
    "weight_decay": typer.Option(help="Weight decay of matrices and filters; by default the recipe's."),
    "dropout": typer.Option(help="Share of the units behind hidden fully connected layers; by default none."),
    "segments": typer.Option(help="A worker's part of the data: drawn (anew each epoch, by default) or fixed."),
    "eval_every": typer.Option(help="Seconds between evaluations, off the clock; 0: only at the end."),
    "eval_steps": typer.Option(min=0, help="Steps between evaluations, off the clock; 0: only at the end."),
    "device": typer.Option(help="Device of every worker's model: cpu, cuda, or one of several as in cuda:1."),
    "data_root": typer.Option(help="Folder of the data set, if not its usual one."),
    "servers": typer.Option(min=1, help="How many server shards hold the model, each a process."),
    "servers_on_workers": typer.Option(
        "--servers-on-workers", help="A server shard on every worker's node, behind the same link."
    ),
    "codec_up": typer.Option(help="Codec of the pushes, in place of the design's: topk\\[fraction=0.01]."),
    "codec_down": typer.Option(help="Codec of the pulls, in place of the design's."),
    "consistency": typer.Option(
        help="bsp, asp, ssp\\[staleness=5], backup\\[1], local\\[2], adaptive\\[norm,threshold=0.01]."
    ),
    "placement": typer.Option(help="heuristic, greedy, round-robin, uniform\\[min=1024] or rows\\[size=128]."),
    "compression": typer.Option(help="Which tensor takes which codec: by-shape, or an installed policy."),
    "transmission": typer.Option(help="wait-free (layer by layer) or traditional (at once)."),
    "short_steps": typer.Option(min=1, help="Steps of a run that only measures seconds per step."),
    "in_process": typer.Option(
        "--in-process", help="Make the full runs in one process: the same weights for less work, without times."
    ),
    # benchmarks
    "hooks": many(
        r"none, fp16, bf16, powersgd-N, a codec as in 3lc\[s=1.75], local updates as in diloco\[h=30], or a sharded "
        "model, fsdp:METHOD or hsdp:METHOD, with none or a codec as METHOD. Options in brackets: gather=int8 codes "
        "parameters too; with start_step=50 earlier steps are uncompressed.",
        "--hook",
    ),
    "methods": many(
        r"As for `bench hooks`; server:DESIGN is a parameter server, local-sgd\[h=4] one of the local updates.",
        "--hook",
    ),
    "target_accuracy": typer.Option(min=0, max=1, help="Images: the test accuracy to reach, 0 … 1."),
    "eval_examples": typer.Option(
        min=1, help="Number of test examples: the first ones, or windows of text at equal distances."
    ),
    "give_up": typer.Option(min=1, help="Images: stop a hook at this multiple of the best time so far."),
    "rates": Annotated[
        str, typer.Option(metavar="RATES", help="Text: learning rates to try each method with, commas between.")
    ],
    "timed_steps": typer.Option(min=1, help="Text: steps on each link, to measure the seconds per step."),
    "timed_seconds": typer.Option(min=0, help="Text: end a run on a link after this many seconds."),
    "margin": typer.Option(min=0, help="Text: the target is the loss of `none` plus this many nats."),
    "only": many("A codec, options in brackets; by default all, and raw compressors."),
    "elements": Annotated[list[int], typer.Option(min=1, max=2**32, help="Number of values; repeat for several.")],
    "zero_fraction": Annotated[list[float], typer.Option(min=0, max=1, help="Share of zeros; repeat for several.")],
    "turns": typer.Option(min=1, help="Timed turns of each candidate; medians are shown."),
    "layers": Annotated[
        list[int], typer.Option(min=1, help="Layers of the two models, a million parameters each; give it twice.")
    ],
    "cores": typer.Option(min=1, help="Processors of the prediction; by default this machine's."),
    "learners": Annotated[list[int], typer.Option(min=2, max=4096, help="How many learners; repeat for several.")],
    "mtbf_minutes": Annotated[
        list[float], typer.Option(min=0.5, help="Mean minutes between two failures of a learner; repeat for several.")
    ],
    "minutes": typer.Option(min=1, help="Minutes of virtual time."),
    "restart_s": typer.Option(min=0, help="Seconds from a learner's failure to its next step."),
    "h": typer.Option(min=3, help="Inner steps between two contributions of a fragment; one takes a second."),
    "grace_s": typer.Option(min=0, help="The grace window, in seconds."),
    # chaos
    "runs": typer.Option(min=1, help="How many trainings."),
    "first": typer.Option(min=0, help="Number of the first trial; --runs 1 repeats this trial alone."),
    "fork": typer.Option(help="Start processes as forks of one that has imported everything."),
    "every": typer.Option(min=1, help="Rounds between two faults."),
    "strikes": typer.Option(
        min=1, help="This many faults at random steps, each over before the next; by default one --every rounds."
    ),
    "peace": typer.Option("--peace", help="Run each design without faults too, and show the goodput."),
    "worker_grace_s": typer.Option(min=0, help="The server's --worker-grace-s."),
    "checkpoint_every": CheckpointEvery,
    "points": typer.Option(min=0, help="Percentage points that accuracy may be below the undisturbed training's."),
}
"""The options of dataclasses' fields, by the field's name; where no type is given it is the field's."""


def listed(name: str, value: Any, kind: Any) -> tuple[Any, ...]:
    """Returns the values of a list option: one text with commas, or repeated values.

    >>> listed("rates", "2e-3, 0.004", tuple[float, ...])
    (0.002, 0.004)
    """
    [element] = get_args(kind)[:1]
    try:
        return tuple(map(element, split_names(value) if isinstance(value, str) else value))
    except ValueError as error:
        raise ConfigError(f"{name} {value!r}; expected numbers with commas between, as in 2e-3,4e-3") from error


def takes(
    kind: type[Any], *, without: tuple[str, ...] = (), **own: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces a command's first parameter by one option for each field of a dataclass, with the field's default.

    The class's own fields come first, then inherited ones.
    """

    types = get_type_hints(kind)

    def option(field: Field[Any]) -> inspect.Parameter:
        annotation, default = own.get(field.name, OPTIONS.get(field.name)), field.default
        if annotation is None or default is MISSING:
            raise TypeError(f"{kind.__name__}.{field.name} has no option, or no default")
        if isinstance(annotation, OptionInfo):
            annotation = Annotated[types[field.name], annotation]
        if isinstance(default, tuple):
            default = list(default) if "list" in str(annotation) else ",".join(default)
        return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        given, *rest = inspect.signature(command, eval_str=True).parameters.values()
        rest = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in rest]
        ordered = sorted(fields(kind), key=lambda field: field.name not in kind.__annotations__)
        chosen = {field.name: field for field in ordered if field.init and field.name not in without}
        taken = [option(field) for field in chosen.values()]
        required = [each for each in rest if each.default is each.empty]
        parameters = [*required, *taken, *(each for each in rest if each.default is not each.empty)]

        @wraps(command)
        def filled(**values: Any) -> None:
            options = {name: values.pop(name) for name in chosen.keys() & values.keys()}
            for name, value in options.items():
                if isinstance(chosen[name].default, tuple):
                    options[name] = listed(name, value, types[name])
            command(**{given.name: kind(**options)}, **values)

        filled.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        filled.__annotations__ = {each.name: each.annotation for each in parameters}
        return filled

    return decorate
