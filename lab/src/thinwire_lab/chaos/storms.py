"""Storms: a training that is struck again and again; and many short ones, over all designs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.policies.consistency import consistency
from thinwire.policies.designs import design, designs
from thinwire.quantities import number_text
from thinwire_lab.bench.harness import Column, Measured, Tell
from thinwire_lab.chaos.faults import KINDS, WITHOUT_PRIVILEGES, check_kinds, draw
from thinwire_lab.chaos.options import StormOptions, StormsOptions
from thinwire_lab.chaos.outcome import Outcome, with_problem
from thinwire_lab.chaos.stage import Stage
from thinwire_lab.chaos.trials import Scenario, Trial
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.processes import Elastic
from thinwire_lab.workloads.data import data

STORM_COLUMNS: Sequence[Column[Trial, Outcome]] = (
    ("trial", lambda cell, runs: str(cell)),
    ("design", lambda cell, runs: cell.design),
    ("ended", lambda cell, runs: "right" if not runs[0].problems else "NOT RIGHT"),
    ("faults", lambda cell, runs: str(len(runs[0].faults))),
    ("steps", lambda cell, runs: str(runs[0].steps)),
    ("steps / s", lambda cell, runs: f"{runs[0].steps_per_second:.1f}"),
    ("missing", lambda cell, runs: f"{runs[0].missing:.0f}"),
    ("late", lambda cell, runs: f"{runs[0].late:.0f}"),
    ("redone", lambda cell, runs: str(runs[0].redone)),
    ("slowest back s", lambda cell, runs: number_text(max(runs[0].back_s, default=None), ".1f")),
    ("accuracy", lambda cell, runs: number_text(runs[0].accuracy, ".2%")),
    ("points", lambda cell, runs: number_text(runs[0].points, "+.2f")),
)


@dataclass(kw_only=True)
class Storm(StormOptions, Scenario):
    """One long training, struck after every so many rounds, beside the same one in peace.

    Right is: the last step is reached, with equal weights, no gradient lost or counted twice, and an accuracy no more
    than `points` below. Goodput is steps per second, beside those of the training in peace.

    Args:
        every: rounds between two faults.
        faults: which, keys of `faults.KINDS`.
        min_workers: of the server; None: half of them.
        worker_grace_s, straggler_grace_s: of the server; how long the others wait for a dead or a frozen worker.
        checkpoint_every: exchanges between checkpoints, where the server is killed or its disk is full; fewer where
            there are not six times as many.
        points: percentage points that the accuracy may be below.
    """

    name = "storm"
    key_options = (
        *Scenario.key_options,
        *("every", "min_workers", "worker_grace_s", "straggler_grace_s", "checkpoint_every", "points"),
    )
    left = 3
    columns = STORM_COLUMNS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kinds(self.faults)
        if self.every < 1:
            raise ConfigError(f"a fault every {self.every} rounds; at least 1 is needed")

    def cells(self) -> Sequence[Trial]:
        return [self.trial(-1, scenario="peace"), *super().cells()]

    def trial(self, number: int, **given: object) -> Trial:
        return super().trial(number, **{"faults": ",".join(self.faults), **given})

    def measure(self, cell: Trial, before: Measured[Trial, Outcome], tell: Tell) -> Outcome:
        if cell.scenario == "peace":
            return self.staged(cell, tell, lambda stage: None, **self.options(cell))
        every, rounds = self.every, exchanges(cell.job())
        if rounds < 6 * every:
            every = max(1, rounds // 6)
        storm = draw(
            f"{cell.seed}/{cell.number}", cell.faults.split(","), workers=cell.workers, every=every, rounds=rounds
        )

        def play(stage: Stage) -> None:
            for number, fault in enumerate(storm, start=1):
                stage.until_step(fault.round)
                if stage.done:
                    break
                stage.strike(fault)
                tell(f"step {stage.audit.version}, fault {number} of {len(storm)}: {fault.kind}")

        outcome = self.staged(cell, tell, play, **self.options(cell))
        if not outcome.faults:
            outcome = with_problem(outcome, "nothing could strike")
        return self.beside(cell, outcome, tell, points=self.points)

    def options(self, cell: Trial) -> dict[str, object]:
        """The stage's options for a trial."""
        kinds = cell.faults.split(",")
        every = min(self.checkpoint_every, max(1, exchanges(cell.job()) // 6))  # where there are few, some of them, too
        elastic = Elastic(
            min_workers=self.min_workers or max(1, cell.workers // 2),
            worker_grace_s=self.worker_grace_s,
            straggler_grace_s=self.straggler_grace_s,
        )
        elastic.check(cell.workers)
        return {
            "elastic": elastic,
            "checkpoint_every": every if {"server", "disk"} & set(kinds) else None,
            "tiny_disk": "disk" in kinds,
        }

    def compared(self, cell: Trial, measured: Measured[Trial, Outcome]) -> dict[str, float | None]:
        peace = [runs[0].steps_per_second for other, runs in measured.items() if other.scenario == "peace"]
        own = measured[cell][0].steps_per_second
        return {"goodput": own / peace[0] if peace and peace[0] else None}


@dataclass(kw_only=True)
class Storms(StormsOptions, Storm):
    """Many short storms: each of a design of its own and of a few kinds of faults, drawn by its number.

    Designs whose workers alone hold the model are spared deaths, after which nobody could give it to a new process.

    Args:
        designs: names, one after the other; none: all designs.

    Raises:
        ConfigError: a design that is made for none of the faults.
    """

    name = "storms"

    def __post_init__(self) -> None:
        super().__post_init__()
        for number in range(self.first, self.first + self.runs):
            suiting(self.faults, self.design_of(number))

    def cells(self) -> Sequence[Trial]:
        return Scenario.cells(self)

    def trial(self, number: int, **given: object) -> Trial:
        name = self.design_of(number)
        possible = suiting(self.possible(), name)
        chance = super().trial(number).chance
        kinds = chance.sample(possible, min(len(possible), 3))
        return super().trial(number, design=name, faults=",".join(kinds), **given)

    def design_of(self, number: int) -> str:
        """Returns the name of the design that a trial's number is of."""
        names = list(self.designs) or list(designs())
        return names[number % len(names)]

    def possible(self) -> list[str]:
        """The kinds that this machine and user can do.

        Raises:
            ConfigError: this machine and user can do none of `faults`.
        """
        kernel = self.links().shaping == "kernel"
        found = [kind for kind in self.faults if kernel or kind in WITHOUT_PRIVILEGES]
        if not found:
            raise ConfigError(
                f"faults {', '.join(self.faults)}: they need links that the kernel shapes, which are not to be had "
                f"here; name one of {', '.join(WITHOUT_PRIVILEGES)} too"
            )
        return found

    def compared(self, cell: Trial, measured: Measured[Trial, Outcome]) -> dict[str, float | None]:
        return {}


def suits(kind: str, name: str) -> bool:
    """Whether a design is made for a fault: where no shard has the model, nobody can begin late; `asp` has no steps.

    >>> suits("kill", "3lc"), suits("kill", "terngrad"), suits("stop", "terngrad")
    (True, False, True)
    """
    chosen = design(name)
    if chosen.downlink == "gradient":
        return kind in KINDS.keys() - {"kill", "server"}
    return kind not in ("server", "disk") or not consistency(chosen.consistency).immediate


def suiting(kinds: Sequence[str], name: str) -> list[str]:
    """Returns the kinds of faults that a design is made for.

    Raises:
        ConfigError: there are none.
    """
    found = [kind for kind in kinds if suits(kind, name)]
    if not found:
        raise ConfigError(
            f"design {name!r} is made for none of the faults {', '.join(kinds)}; name other faults, or other designs"
        )
    return found


def exchanges(job: Job) -> int:
    """Returns how many rounds a training has, which may have several steps each."""
    recipe = job.recipe()
    epoch = len(data(job.data, root=job.data_root, context=recipe.context).train_x) // job.workers // recipe.batch
    policy = consistency(job.full_design().with_epoch(epoch).consistency)
    rounds = 0
    while policy.iterations(rounds + 1) <= recipe.steps:
        rounds += 1
    return rounds
