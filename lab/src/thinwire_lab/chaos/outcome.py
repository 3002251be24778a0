"""The outcome of one disturbed training, and whether it ended as it should."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UnsetType

from thinwire.policies.consistency import Quorum, consistency
from thinwire_lab.bench.harness import Figures
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome

SETTLED_MINUTE = 10.0  # from when on the server should not grow any more
GROWTH_MB = 5.0  # how much its memory may grow from then on


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a server's process, so many minutes after its start."""

    minute: float
    rss_mb: float  # resident memory, in MB
    descriptors: int  # open files and sockets
    threads: int  # of the process


_OWN_NAMES = {"faults": "struck", "steps": "steps_done", "seconds": "seconds_taken"}
"""The names of figures in a row, beside the trial's faults, steps and seconds."""


class Outcome(Figures, frozen=True, kw_only=True):
    """The outcome of one training."""

    problems: list[str]  # why it did not end right; nothing where it did
    faults: list[str]  # what struck it, in words, in order
    steps: int  # the last version that every table reached
    said_s: float | None = None  # from a worker's death until the last of the other workers had reported it
    back_s: tuple[float, ...] = ()  # see `Witnesses.back`
    joining_s: tuple[float, ...] = ()  # see `Witnesses.joining`
    accuracy: float | None = None  # of worker 0 on the test set, 0 … 1; None where it did not reach the end
    undisturbed: float | None = None  # the accuracy of the same training without faults
    steps_per_second: float = 0.0  # from the first update to the last
    missing: float = 0.0  # gradients that updates were made without, counted in whole models
    late: float = 0.0  # see `Audit`
    redone: int = 0  # see `Audit`
    weights: tuple[str, ...] = ()  # of the workers that reached the end, as one digest; several where they differ
    seconds: float = 0.0  # of the whole trial, from the start of the processes on
    samples: tuple[Sample, ...] = ()  # of the last server process
    lines: tuple[str, ...] = ()  # the last lines that processes printed, where something went wrong

    def row(self) -> dict[str, Any]:
        """As of any figures; what a trial was asked to be has some of their names."""
        return {_OWN_NAMES.get(name, name): value for name, value in super().row().items()}

    @property
    def points(self) -> float | None:
        if self.accuracy is None or self.undisturbed is None:
            return None
        return 100 * (self.accuracy - self.undisturbed)


def ends(job: Job, done: Mapping[int, WorkerOutcome]) -> list[str]:
    """Returns the problems of a training's end: workers that did not reach the last step, or replicas that differ."""
    problems = []
    policy = consistency(job.full_design().consistency)
    steps = 0 if job.seconds else job.recipe().steps
    behind = [outcome for outcome in done.values() if outcome.steps < steps]
    if policy.quorum(job.workers) < job.workers and len(behind) < len(done):
        behind = []  # one that was late goes on from the newest version, and takes a step less than the others
    together = list(done.values())
    if isinstance(policy, Quorum):
        behind = []  # they end once they have taken enough steps together
        # One that comes back when the others have ended trains on alone until it hears so.
        together = [outcome for outcome in together if outcome.steps > 2 * policy.h] or together
    if not done:
        problems.append("nobody reached the end")
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
    """Returns what has grown too much since the server should have settled.

    Single samples are of a moment when a worker may be joining, so the least and most of two halves are compared:
    memory by the most of each, descriptors and threads by the least.
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
