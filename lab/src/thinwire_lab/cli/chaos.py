"""`thinwire chaos`: trainings of real processes that are killed, frozen, cut off and called by strangers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.lazy import lazy
from thinwire_lab.chaos.faults import KINDS
from thinwire_lab.chaos.options import (
    BackupDeathOptions,
    ServerDeathOptions,
    SoakOptions,
    StormOptions,
    StormsOptions,
    WorkerDeathOptions,
)
from thinwire_lab.cli import options
from thinwire_lab.cli.bench_options import Resume
from thinwire_lab.cli.measuring import measure

if TYPE_CHECKING:
    from thinwire_lab.chaos import deaths
    from thinwire_lab.chaos import soak as soaks
    from thinwire_lab.chaos import storms as many_storms
else:
    deaths, soaks = lazy("thinwire_lab.chaos.deaths"), lazy("thinwire_lab.chaos.soak")
    many_storms = lazy("thinwire_lab.chaos.storms")

app = typer.Typer(no_args_is_help=True, help="Kill, freeze and cut off real processes, and see the training end right.")

Runs = typer.Option(min=1, help="How many trainings.")
Steps = typer.Option(min=30, help="Steps of each training.")
Link = typer.Option(help="Rate of every process's link, both ways: 10mbit, 1gbit; none.")
Grace = typer.Option(min=0, help="The server's --worker-grace-s.")
Straggler = Annotated[
    float | None,
    typer.Option(min=0.1, help="The server's --straggler-grace-s; by default frozen workers are waited for."),
]
Least = Annotated[int | None, typer.Option(min=1, help="The server's --min-workers; by default few enough.")]
OWN: dict[str, Any] = {
    "runs": Runs,
    "steps": Steps,
    "link": Link,
    "worker_grace_s": Grace,
    "straggler_grace_s": Straggler,
    "min_workers": Least,
    "points": typer.Option(min=0, help="Percentage points that accuracy may be below the undisturbed training's."),
    "spare": typer.Option(min=1, help=r"Backup workers, b of backup\[b], and how many are killed."),
    "checkpoint_every": options.CheckpointEvery,
    "deaths": typer.Option(min=1, help="Deaths in each training, one after the other."),
    "first": typer.Option(min=0, help="The number of the first trial; with --runs 1, one is played again."),
    "every": typer.Option(min=1, help="Rounds between two faults."),
    "faults": options.names(f"Kinds with commas between: {', '.join(KINDS)}."),
    "designs": options.names("Designs with commas between; by default all."),
    "minutes": typer.Option(help="How long."),
    "churn_s": typer.Option(help="Seconds between a death and a join."),
    "fork": typer.Option(help="Start processes as forks of one that has imported everything."),
    "growth_mb": typer.Option(help="How much the server's memory may grow after minute 10, in MB."),
}


@app.command("worker-death", epilog="Example: thinwire chaos worker-death --runs 20 --json worker-death.json")
@options.takes(WorkerDeathOptions, **OWN)
def worker_death(
    given: WorkerDeathOptions, resume: Resume = False, png: options.Png = None, json: options.Json = None
) -> None:
    """Kill a worker at a random step and start the same command again."""
    measure(deaths.WorkerDeath(**vars(given)), json, resume, png)


@app.command("backup-death", epilog="Example: thinwire chaos backup-death --spare 1 --runs 10")
@options.takes(BackupDeathOptions, **OWN)
def backup_death(
    given: BackupDeathOptions, resume: Resume = False, png: options.Png = None, json: options.Json = None
) -> None:
    r"""Kill as many workers as backup\[b] has to spare, for good."""
    measure(deaths.BackupDeath(**vars(given)), json, resume, png)


@app.command("server-death", epilog="Example: thinwire chaos server-death --runs 20 --json server-death.json")
@options.takes(ServerDeathOptions, **OWN)
def server_death(
    given: ServerDeathOptions, resume: Resume = False, png: options.Png = None, json: options.Json = None
) -> None:
    """Kill the server and start it again with --resume: the weights must be those of an undisturbed training."""
    measure(deaths.ServerDeath(**vars(given)), json, resume, png)


@app.command(epilog="Example: thinwire chaos storm --every 20 --faults kill,stop,cut,slow --json storm.json")
@options.takes(StormOptions, **OWN)
def storm(given: StormOptions, resume: Resume = False, png: options.Png = None, json: options.Json = None) -> None:
    """Strike one long training after every so many rounds: goodput, accuracy, and no gradient lost or counted twice."""
    measure(many_storms.Storm(**vars(given)), json, resume, png)


@app.command(epilog="Example, the 17th storm once more: thinwire chaos storms --first 17 --runs 1")
@options.takes(StormsOptions, without=("design",), **OWN)
def storms(given: StormsOptions, resume: Resume = False, png: options.Png = None, json: options.Json = None) -> None:
    """Strike many short trainings, of all designs, with faults of all kinds."""
    measure(many_storms.Storms(**vars(given)), json, resume, png)


@app.command(epilog="Example: thinwire chaos soak --minutes 60 --json soak.json --png soak.png")
@options.takes(SoakOptions, without=("steps",), **OWN)
def soak(given: SoakOptions, resume: Resume = False, png: options.Png = None, json: options.Json = None) -> None:
    """Let workers come and go for an hour, and watch the server's memory, descriptors and threads."""
    measure(soaks.Soak(**vars(given)), json, resume, png)
