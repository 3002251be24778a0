"""Trials: one training each, disturbed in one way, and what became of it. The base of all scenarios."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET

from thinwire.errors import ConfigError, EngineError
from thinwire.presentation.charts import Chart
from thinwire.quantities import number_text
from thinwire_lab.bench.harness import Bench, Column, Measured, Tell
from thinwire_lab.chaos import charts
from thinwire_lab.chaos.options import ScenarioOptions
from thinwire_lab.chaos.outcome import Outcome, ends, with_problem
from thinwire_lab.chaos.stage import Stage
from thinwire_lab.engines.starters import Starter
from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.cluster import Links, choose_links
from thinwire_lab.jobs.forks import forks
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a scenario; everything that tells it from another. Its chance is of `seed` and `number`."""

    scenario: str
    number: int
    seed: int
    design: str
    model: str
    data: str
    workers: int
    steps: int
    link: str | None
    consistency: str | None = None
    faults: str = ""
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.scenario} {self.number}"

    @property
    def chance(self) -> random.Random:
        """The trial's own random numbers, from their beginning."""
        return random.Random(f"{self.scenario}/{self.seed}/{self.number}")

    def job(self) -> Job:
        """What is trained."""
        names = ("design", "model", "data", "workers", "link", "consistency", "seed", "seconds")
        steps = self.steps if self.seconds is None else None
        return Job(steps=steps, **{name: getattr(self, name) for name in names})


@dataclass(kw_only=True)
class Scenario(ScenarioOptions, Bench[Trial, Outcome]):
    """Trials of one kind.

    Args:
        runs: how many trainings.
        first: the number of the first of them; a trial is played again by its number and the seed.
        seed: of the weights and the batches of all of them, and with their numbers of what strikes them.
        design, model, data, workers, steps, link: of the trainings.
        shaping: who makes the links thin.
        fork: processes are forks of one that has imported everything: a start costs much less. Not for figures that say
            how long one takes.
    """

    kinds = (Outcome,)
    serves = True
    key_options: ClassVar[Sequence[str]] = ("shaping", "fork")
    left = 2
    name = ""

    _undisturbed: dict[Job, RunOutcome] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ConfigError(f"{self.runs} runs; at least 1 is needed")
        if self.steps < 30:
            raise ConfigError(f"{self.steps} steps; at least 30 are needed, for something to happen in their middle")

    # ---- the grid

    def cells(self) -> Sequence[Trial]:
        return [self.trial(number) for number in range(self.first, self.first + self.runs)]

    def trial(self, number: int, **given: Any) -> Trial:
        """Returns the trial of a number, with this scenario's options, or others in their place."""
        names = ("seed", "design", "model", "data", "workers", "steps", "link")
        return Trial(
            **{"scenario": self.name, "number": number, **{each: getattr(self, each) for each in names}, **given}
        )

    def thin_link(self) -> tuple[str | None, str]:
        return self.link, self.shaping

    def links(self) -> Links:
        """How the links are made; by the kernel where it may, also without a limit."""
        links = choose_links(self.link, self.shaping)
        if links.shaping == "none" and self.shaping == "auto":
            links = choose_links("100gbit", "auto")
            links = links if links.shaping == "kernel" else choose_links(None)
        return links

    def starter(self) -> Starter | None:
        """What makes the processes of all trials; None: each is a program of its own."""
        return forks() if self.fork else None

    # ---- one trial

    def measure(self, cell: Trial, before: Measured[Trial, Outcome], tell: Tell) -> Outcome:
        raise NotImplementedError

    def staged(self, cell: Trial, tell: Tell, play: Callable[[Stage], None], **options: Any) -> Outcome:
        """Runs a training on a stage, and says what became of it.

        Args:
            cell: which.
            tell: takes a word on progress.
            play: disturbs the training, and follows it as far as it has to.
            options: of the stage.
        """
        began, job = time.time(), cell.job()
        stage: Stage | None = None
        problems: list[str] = []
        try:
            with Stage(job, self.links(), starter=self.starter(), **options) as stage:
                tell("starting")
                stage.until(lambda: stage is not None and stage.audit.version > 0)
                tell("training")
                play(stage)
                stage.finish()
        except EngineError as error:
            problems.append(str(error))
        if stage is None:
            return Outcome(problems=problems, faults=[], steps=0, seconds=time.time() - began)
        problems = [*stage.problems, *stage.audit.problems, *problems, *ends(job, stage.done)]
        accuracy = stage.done[0].test_accuracy if 0 in stage.done else UNSET
        audit = stage.audit
        return Outcome(
            problems=problems,
            faults=[str(fault) for fault in stage.happened],
            steps=audit.version,
            said_s=max(stage.seen.said, default=None),
            back_s=tuple(stage.seen.back),
            joining_s=tuple(stage.seen.joining),
            accuracy=None if accuracy is UNSET else accuracy,
            steps_per_second=audit.steps_per_second,
            missing=audit.missing,
            late=audit.late,
            redone=audit.redone,
            weights=tuple(sorted({outcome.weights for outcome in stage.done.values()})),
            seconds=time.time() - began,
            lines=tuple(stage.lines) if problems else (),
        )

    def undisturbed(self, cell: Trial, tell: Tell) -> RunOutcome:
        """Returns what the same training comes to in one process, with nothing to disturb it: bit for bit the same."""
        job = replace(cell.job(), link=None)
        if job not in self._undisturbed:
            tell("the same without faults, in one process")
            self._undisturbed[job] = in_process.run(job)
        return self._undisturbed[job]

    def beside(self, cell: Trial, outcome: Outcome, tell: Tell, **limits: float) -> Outcome:
        """Returns the outcome with the undisturbed accuracy in it; too far below that is a problem.

        Args:
            points: how far below, in percentage points.
        """
        outcome = msgspec.structs.replace(outcome, undisturbed=self.undisturbed(cell, tell).test_accuracy)
        if outcome.points is not None and outcome.points < -limits.get("points", math.inf):
            outcome = with_problem(outcome, f"{-outcome.points:.1f} points below the undisturbed accuracy")
        return outcome

    # ---- what came out

    def failed(self, figures: Outcome) -> bool:
        return bool(figures.problems)

    def line(self, cell: Trial, figures: Outcome) -> str:
        struck = "; ".join(figures.faults[:3]) + (f"; {len(figures.faults)} in all" if figures.faults[3:] else "")
        end = f"NOT RIGHT: {figures.problems[0]}" if figures.problems else "right"
        return f"{cell}: {struck or 'nothing'}: {end} ({figures.steps} steps, {figures.seconds:.0f} s)"

    def notes(self, measured: Measured[Trial, Outcome]) -> list[str]:
        runs = [run for each in measured.values() for run in each]
        right = sum(not run.problems for run in runs)
        said = [run.said_s for run in runs if run.said_s is not None]
        back = [seconds for run in runs for seconds in run.back_s]
        joining = [seconds for run in runs for seconds in run.joining_s]
        points = [run.points for run in runs if run.points is not None]
        notes = [f"{right} of {len(runs)} ended right; links {self.link}, shaped by: {self.links().shaping}"]
        notes += [f"the others said so after at most {max(said):.2f} s"] if said else []
        notes += [f"back after {_spread(back)} s (least, median, most)"] if back else []
        notes += [f"of that, from their Join on {_spread(joining)} s: the rest is a process's start"] if joining else []
        if points:
            notes.append(f"accuracy beside the undisturbed training: {_spread(points, '+.2f')} points")
        return notes

    def chart(self, measured: Measured[Trial, Outcome]) -> Chart | None:
        return charts.trials({cell.number: runs[0].back_s for cell, runs in measured.items()}, self.name)


def _spread(values: Sequence[float], form: str = ".1f") -> str:
    """A median and the extremes.

    >>> _spread([3.0, 1.0, 2.0])
    '1.0 … 2.0 … 3.0'
    """
    ordered = sorted(values)
    return " … ".join(format(each, form) for each in (ordered[0], ordered[len(ordered) // 2], ordered[-1]))


COLUMNS: Sequence[Column[Trial, Outcome]] = (
    ("trial", lambda cell, runs: str(cell)),
    ("what struck", lambda cell, runs: runs[0].faults[0] if runs[0].faults else "–"),
    ("ended", lambda cell, runs: "right" if not runs[0].problems else "NOT RIGHT"),
    ("steps", lambda cell, runs: str(runs[0].steps)),
    ("said after s", lambda cell, runs: number_text(runs[0].said_s, ".2f")),
    ("back after s", lambda cell, runs: number_text(max(runs[0].back_s, default=None), ".1f")),
    ("accuracy", lambda cell, runs: number_text(runs[0].accuracy, ".2%")),
    ("points", lambda cell, runs: number_text(runs[0].points, "+.2f")),
    ("missing", lambda cell, runs: f"{runs[0].missing:.0f}"),
    ("seconds", lambda cell, runs: f"{runs[0].seconds:.0f}"),
)
"""Of the tables of trials that are struck once or twice."""
