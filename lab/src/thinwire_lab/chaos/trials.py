"""Trials: one training each with its faults, and its outcome."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from thinwire.errors import EngineError
from thinwire_lab.bench.harness import Tell
from thinwire_lab.chaos.outcome import Outcome, ends, growth
from thinwire_lab.chaos.stage import Stage
from thinwire_lab.jobs.cluster import Links
from thinwire_lab.jobs.job import Job


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training. `seed` and `number` decide its random numbers."""

    scenario: str
    number: int
    seed: int
    design: str
    model: str
    data: str
    workers: int
    link: str | None
    steps: int | None = None
    consistency: str | None = None
    faults: str = ""

    def __str__(self) -> str:
        return f"{self.scenario} {self.number}"

    @property
    def chance(self) -> random.Random:
        """The trial's random numbers, from the first."""
        return random.Random(f"{self.scenario}/{self.seed}/{self.number}")

    def job(self) -> Job:
        names = ("design", "model", "data", "workers", "steps", "link", "consistency", "seed")
        return Job(**{name: getattr(self, name) for name in names})


def staged(cell: Trial, links: Links, tell: Tell, cause_faults: Callable[[Stage], None], **options: Any) -> Outcome:
    """Returns the outcome of a trial; `cause_faults` disturbs it."""
    began, job = time.time(), cell.job()
    stage: Stage | None = None
    problems: list[str] = []
    try:
        with Stage(job, links, **options) as stage:
            tell("starting")
            stage.until(lambda: stage is not None and stage.audit.version > 0)
            tell("training")
            cause_faults(stage)
            stage.finish()
    except EngineError as error:
        problems.append(str(error))
    if stage is None:
        return Outcome(problems=problems, struck=[], steps_done=0, seconds_taken=time.time() - began)
    problems = [*stage.problems, *stage.audit.problems, *problems, *ends(job, stage.done), *growth(stage.samples)]
    accuracy = stage.done[0].test_accuracy if 0 in stage.done else UNSET
    audit = stage.audit
    return Outcome(
        problems=problems,
        struck=[str(fault) for fault in stage.happened],
        steps_done=audit.version,
        back_s=tuple(stage.returns.back),
        joining_s=tuple(stage.returns.joining),
        accuracy=None if accuracy is UNSET else accuracy,
        **{name: getattr(audit, name) for name in ("steps_per_second", "missing", "late", "redone")},
        weights=tuple(sorted({outcome.weights for outcome in stage.done.values()})),
        seconds_taken=time.time() - began,
        samples=tuple(stage.samples),
        lines=tuple(stage.lines) if problems else (),
    )
