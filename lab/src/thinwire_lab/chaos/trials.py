"""Trials: one training each with its faults, its outcome, and the problems of its end."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from thinwire.errors import EngineError
from thinwire.policies.consistency import Quorum, consistency
from thinwire_lab.bench.harness import Figures, Tell
from thinwire_lab.chaos.stage import Sample, Stage
from thinwire_lab.jobs.cluster import Links
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome

SETTLED_MINUTE = 10.0  # from this minute on the server must not grow
GROWTH_MB = 5.0  # how much its memory may still grow


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


class Outcome(Figures, frozen=True, kw_only=True):
    """The outcome of one training."""

    problems: list[str]  # why it did not end right; empty where it did
    struck: list[str]  # the faults that occurred, in order
    steps_done: int  # the last version that every table reached
    back_s: tuple[float, ...] = ()  # see `Returns.back`
    joining_s: tuple[float, ...] = ()  # see `Returns.joining`
    accuracy: float | None = None  # of worker 0 on the test set, 0 … 1; None where it did not reach the end
    undisturbed: float | None = None  # the accuracy of the same training without faults
    steps_per_second: float = 0.0  # from the first update to the last
    missing: float = 0.0  # see `Audit`
    late: float = 0.0  # see `Audit`
    redone: int = 0  # see `Audit`
    weights: tuple[str, ...] = ()  # digest of the final weights; several where workers differ
    seconds_taken: float = 0.0  # of the whole trial, with the start of the processes
    samples: tuple[Sample, ...] = ()  # of the last server process
    lines: tuple[str, ...] = ()  # the last lines that processes printed, of a failed trial

    @property
    def points(self) -> float | None:
        if self.accuracy is None or self.undisturbed is None:
            return None
        return 100 * (self.accuracy - self.undisturbed)


def ends(job: Job, done: Mapping[int, WorkerOutcome]) -> list[str]:
    """Returns the problems of a training's end: workers that stopped early, replicas that differ, infinite losses."""
    problems = []
    policy = consistency(job.full_design().consistency)
    steps = 0 if job.seconds else job.recipe().steps
    behind = [outcome for outcome in done.values() if outcome.steps < steps]
    if policy.quorum(job.workers) < job.workers and len(behind) < len(done):
        behind = []  # a late worker continues from the newest version, and so takes fewer steps
    together = list(done.values())
    if isinstance(policy, Quorum):
        behind = []  # learners end after enough steps in all
        # A learner that returns after the end of the others trains alone until it hears of the end.
        together = [outcome for outcome in together if outcome.steps > 2 * policy.h] or together
    if not done:
        problems.append("no worker reached the end")
    problems += [f"worker {each.rank} ended after {each.steps} of {steps} steps" for each in behind]
    digests = {outcome.weights for outcome in together}
    if len(digests) > 1 and policy.replicas_end_equal:
        problems.append(f"the workers ended with {len(digests)} different models")
    losses = [outcome.train_loss for outcome in done.values()]
    if not all(isinstance(loss, UnsetType) or math.isfinite(loss) for loss in losses):
        problems.append("the loss is not finite")
    return problems


def with_problem(outcome: Outcome, problem: str) -> Outcome:
    return msgspec.structs.replace(outcome, problems=[*outcome.problems, problem])


def growth(samples: Sequence[Sample]) -> list[str]:
    """Returns the resources that grew too much after the first ten minutes.

    A worker may be joining at any one sample. The function compares the samples' two halves: memory by the maximum of
    each, descriptors and threads by the minimum.
    """
    settled = [each for each in samples if each.minute >= SETTLED_MINUTE]
    first, second = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    if not first:
        return []
    problems = []
    more = max(each.rss_mb for each in second) - max(each.rss_mb for each in first)
    if more > GROWTH_MB:
        problems.append(f"the server grew by {more:.1f} MB since minute {SETTLED_MINUTE:g}")
    for name in ("descriptors", "threads"):
        counts = [min(getattr(each, name) for each in half) for half in (first, second)]
        if counts[1] > counts[0]:
            problems.append(f"the server's {name} grew from {counts[0]} to {counts[1]} since minute {SETTLED_MINUTE:g}")
    return problems


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
