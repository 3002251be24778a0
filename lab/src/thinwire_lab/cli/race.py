"""`thinwire race`: to a test accuracy where models see images, to a held-out loss where they read text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from thinwire.cli.lazy import lazy
from thinwire.cli.options import was_given
from thinwire.errors import ConfigError
from thinwire_lab.bench.options import LossRaceOptions, RaceOptions
from thinwire_lab.cli import options
from thinwire_lab.cli.bench_options import (
    EvalEvery,
    EvalExamples,
    Margin,
    MaxSteps,
    Place,
    Racers,
    Rates,
    Resume,
    TimedSeconds,
    TimedSteps,
)
from thinwire_lab.cli.measuring import measure
from thinwire_lab.cli.options import takes

if TYPE_CHECKING:
    from thinwire_lab.bench import loss_race as loss_races
    from thinwire_lab.bench import race as races
    from thinwire_lab.workloads import models
else:
    loss_races, races = lazy("thinwire_lab.bench.loss_race"), lazy("thinwire_lab.bench.race")
    models = lazy("thinwire_lab.workloads.models")

app = typer.Typer()

EXAMPLES = (
    "Example: thinwire race --models lenet --links 10mbit --target-accuracy 0.8 --json race.json; "
    "thinwire race --models byte-transformer-1m --links 10mbit,100mbit --seeds 3 --json loss.json"
)
OF_IMAGES = ("target_accuracy", "give_up")


@app.command(epilog=EXAMPLES)
@takes(RaceOptions, without=("hooks", "eval_every", "eval_examples"), steps=MaxSteps, device=Place)
def race(
    given: RaceOptions,
    context: typer.Context,
    hook: Racers = None,
    eval_every: EvalEvery = None,
    eval_examples: EvalExamples = None,
    rates: Rates = None,
    timed_steps: TimedSteps = LossRaceOptions.timed_steps,
    timed_seconds: TimedSeconds = LossRaceOptions.timed_seconds,
    margin: Margin = LossRaceOptions.margin,
    resume: Resume = False,
    png: options.Png = Path("thinwire-race.png"),
    json: options.Json = None,
) -> None:
    """Race DDP hooks to a test accuracy, or language models to a held-out loss.

    To an accuracy: seconds of training, equal seeds, batches and learning rates for all. To a loss: every method, local
    updates among them, at its best rate; full runs without a limit and short ones on each link.

    Every finished run is in the JSON file at once. Ctrl-C keeps what has been measured.
    """
    asked = {"hooks": tuple(hook or ()), "eval_every": eval_every, "eval_examples": eval_examples}
    changed: dict[str, Any] = {name: value for name, value in asked.items() if value}
    of_text = {"timed_steps": timed_steps, "timed_seconds": timed_seconds, "margin": margin}
    text = [model in models.TEXT_MODELS for model in given.models]
    if not any(text):
        refuse(context, (*of_text, "rates"), "to a loss", "text")
        measure(races.RaceBench(**vars(given) | changed), json, resume, png)
        return
    if not all(text):
        raise ConfigError(f"models {', '.join(given.models)}: some read text and some images; race them by themselves")
    refuse(context, OF_IMAGES, "to an accuracy", "images")
    if rates is not None and given.lr is not None:
        raise ConfigError("--lr is one rate and --rates a grid: give one of them")
    for name in ("models", "links", "ranks", "steps", "batch", "seeds", "seed", "bucket_cap_mb", "data_root", "device"):
        changed[name] = getattr(given, name)
    if was_given(context, "data"):
        changed["data"] = given.data
    if rates is not None or given.lr is not None:
        changed["rates"] = split_rates(rates) if rates is not None else (given.lr,)
    measure(loss_races.LossRace(**of_text | changed), json, resume, png)


def refuse(context: typer.Context, names: Sequence[str], race: str, seen: str) -> None:
    """Raises ConfigError where an option was given that belongs to the other kind of race."""
    if strangers := [name for name in names if was_given(context, name)]:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in strangers)
        raise ConfigError(f"{named}: of a race {race}, whose models read {seen}; these models do not")


def split_rates(text: str) -> tuple[float, ...]:
    """Returns the learning rates in a list with commas.

    Raises:
        ConfigError: one is no number.

    >>> split_rates("2e-3, 0.004")
    (0.002, 0.004)
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"rates {text!r}; expected numbers with commas between, as in 2e-3,4e-3") from error
