"""`thinwire race`: image models to a test accuracy, text models to a held-out loss."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.lazy import lazily
from thinwire.cli.options import was_given
from thinwire.errors import ConfigError
from thinwire_lab.bench.options import RaceOptions
from thinwire_lab.cli import options
from thinwire_lab.cli.measuring import measure

with lazily():
    from thinwire_lab.bench import race as races

app = typer.Typer()

OF_IMAGES = ("target_accuracy", "give_up")
OF_TEXT = ("rates", "timed_steps", "timed_seconds", "margin")
MaxSteps = Annotated[int, typer.Option(min=1, help="Maximum steps; the learning rate's schedule is as long.")]


@app.command(
    epilog="Example: thinwire race --models lenet --links 10mbit --target-accuracy 0.8 --json race.json; "
    "thinwire race --models byte-transformer-1m --links 10mbit,100mbit --seeds 3 --json loss.json"
)
@options.takes(RaceOptions, steps=MaxSteps, device=options.Place)
def race(
    given: RaceOptions,
    context: typer.Context,
    resume: options.ResumeGrid = False,
    png: options.Png = Path("thinwire-race.png"),
    json: options.Json = None,
) -> None:
    """Race DDP hooks to a test accuracy, or language models to a held-out loss.

    To an accuracy: seconds of training, with equal seeds, batches and learning rates. To a loss: every method, local
    updates included, at its best learning rate, with full runs without a limit and short runs on each link.

    The command adds every finished run to the JSON file. Ctrl-C keeps the finished runs.
    """
    asked = races.Race(**vars(given))
    if foreign := [name for name in (OF_IMAGES if asked.to_loss else OF_TEXT) if was_given(context, name)]:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise ConfigError(f"{named}: for models of {'images' if asked.to_loss else 'text'} alone")
    measure(asked, json, resume, png)
