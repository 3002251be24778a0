"""The outcome of one disturbed training, and the problems of its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UnsetType

from thinwire.policies.consistency import Quorum, consistency
from thinwire_lab.bench.harness import Figures
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome

SETTLED_MINUTE = 10.0  # from this minute on the server must not grow
GROWTH_MB = 5.0  # how much its memory may still grow


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a server's process, `minute` minutes after its start."""

    minute: float
    rss_mb: float  # resident memory, in MB
    descriptors: int  # open files and sockets
    threads: int  # of the process


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
