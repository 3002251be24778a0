"""`thinwire race`: to a test accuracy where models see images, to a held-out loss where they read text."""

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
MaxSteps = Annotated[int, typer.Option(min=1, help="At most so many; the learning rate's schedule is as long.")]


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

    To an accuracy: seconds of training, equal seeds, batches and learning rates for all. To a loss: every method, local
    updates among them, at its best rate; full runs without a limit and short ones on each link.

    Every finished run is in the JSON file at once. Ctrl-C keeps what has been measured.
    """
    asked = races.Race(**vars(given))
    if strangers := [name for name in (OF_IMAGES if asked.to_loss else OF_TEXT) if was_given(context, name)]:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in strangers)
        kind = "to an accuracy, whose models see images" if asked.to_loss else "to a loss, whose models read text"
        raise ConfigError(f"{named}: of a race {kind}; these models do not")
    measure(asked, json, resume, png)
