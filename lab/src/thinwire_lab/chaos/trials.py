"""Trials: one training each, disturbed in one way, and its outcome. The base of storms and soaks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec import UNSET

from thinwire.errors import ConfigError, EngineError
from thinwire_lab.bench.harness import Bench, Tell
from thinwire_lab.chaos.options import ScenarioOptions
from thinwire_lab.chaos.outcome import Outcome, ends
from thinwire_lab.chaos.stage import Stage
from thinwire_lab.engines.starters import Starter
from thinwire_lab.jobs.cluster import Links, choose_links
from thinwire_lab.jobs.forks import forks
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.processes import Elastic


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
    link: str | None
    steps: int | None = None
    seconds: float | None = None
    consistency: str | None = None
    faults: str = ""

    def __str__(self) -> str:
        return f"{self.scenario} {self.number}"

    @property
    def chance(self) -> random.Random:
        """The trial's own random numbers, from their beginning."""
        return random.Random(f"{self.scenario}/{self.seed}/{self.number}")

    def job(self) -> Job:
        names = ("design", "model", "data", "workers", "steps", "seconds", "link", "consistency", "seed")
        return Job(**{name: getattr(self, name) for name in names})


@dataclass(kw_only=True)
class Scenario(ScenarioOptions, Bench[Trial, Outcome]):
    """Trials of one kind."""

    kinds = (Outcome,)
    serves = True
    key_options: ClassVar[tuple[str, ...]] = ("shaping", "fork", "min_workers", "worker_grace_s")
    left = 3
    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ConfigError(f"{self.runs} runs; at least 1 is needed")
        self.elastic().check(self.workers)

    def elastic(self) -> Elastic:
        """The server's policy for workers that die."""
        return Elastic(
            min_workers=self.min_workers or max(1, self.workers // 2),
            worker_grace_s=self.worker_grace_s,
        )

    def cells(self) -> list[Trial]:
        return [self.trial(number) for number in range(self.first, self.first + self.runs)]

    def trial(self, number: int, **given: Any) -> Trial:
        own = {name: getattr(self, name) for name in ("seed", "model", "data", "workers", "link")}
        return Trial(**{"scenario": self.name, "number": number, **own, **given})

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
        """The starter of all trials' processes; None: each is a program of its own."""
        return forks() if self.fork else None

    def staged(self, cell: Trial, tell: Tell, play: Callable[[Stage], None], **options: Any) -> Outcome:
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
            **{name: getattr(audit, name) for name in ("steps_per_second", "missing", "late", "redone")},
            weights=tuple(sorted({outcome.weights for outcome in stage.done.values()})),
            seconds=time.time() - began,
            lines=tuple(stage.lines) if problems else (),
        )

    def failed(self, figures: Outcome) -> bool:
        return bool(figures.problems)

    def line(self, cell: Trial, figures: Outcome) -> str:
        struck = "; ".join(figures.faults[:3]) + (f"; {len(figures.faults)} in all" if figures.faults[3:] else "")
        end = f"NOT RIGHT: {figures.problems[0]}" if figures.problems else "right"
        return f"{cell}: {struck or 'nothing'}: {end} ({figures.steps} steps, {figures.seconds:.0f} s)"
