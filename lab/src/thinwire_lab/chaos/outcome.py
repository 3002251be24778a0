"""What became of one disturbed training, and whether it ended as it should."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UnsetType

from thinwire.policies.consistency import consistency
from thinwire_lab.bench.harness import Figures
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's process takes, at a minute of a soak.

    Attributes:
        rss_mb: resident memory, in MB.
        descriptors: open files and sockets.
        threads: of the process.
        version: updates so far.
        thread_names: how many threads have each of the kernel's names for them.
    """

    minute: float
    rss_mb: float
    descriptors: int
    threads: int
    version: int
    thread_names: dict[str, int] = {}

    def __str__(self) -> str:
        return f"minute {self.minute:.1f}: {self.rss_mb:.0f} MB, {self.descriptors} descriptors, {self.threads} threads"


_OWN_NAMES = {"faults": "struck", "steps": "steps_done", "seconds": "seconds_taken"}
"""What figures are called in a row, beside the trial's faults, steps and seconds."""


class Outcome(Figures, frozen=True, kw_only=True):
    """What became of one training.

    Attributes:
        problems: why it did not end right; nothing where it did.
        faults: what struck it, in words, in order.
        steps: the last version that every table reached.
        said_s: the latest of the other workers to say that a worker had died, in seconds after its death.
        back_s: see `Witnesses.back`.
        joining_s: see `Witnesses.joining`.
        accuracy: of worker 0 on the test set, 0 … 1; None where it did not reach the end.
        undisturbed: the accuracy of the same training without faults.
        steps_per_second: from the first update to the last.
        missing: gradients that updates were made without, counted in whole models.
        late, redone: see `Audit`.
        weights: of the workers that reached the end, as one digest; several where they differ.
        seconds: of the whole trial, from the start of the processes on.
        samples: of a soak.
        lines: the last lines that processes printed, where something went wrong.
    """

    problems: list[str]
    faults: list[str]
    steps: int
    said_s: float | None = None
    back_s: tuple[float, ...] = ()
    joining_s: tuple[float, ...] = ()
    accuracy: float | None = None
    undisturbed: float | None = None
    steps_per_second: float = 0.0
    missing: float = 0.0
    late: float = 0.0
    redone: int = 0
    weights: tuple[str, ...] = ()
    seconds: float = 0.0
    samples: tuple[Sample, ...] = ()
    lines: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        """As of any figures; what a trial was asked to be has some of their names."""
        return {_OWN_NAMES.get(name, name): value for name, value in super().row().items()}

    @property
    def points(self) -> float | None:
        """Percentage points of accuracy above the undisturbed training."""
        if self.accuracy is None or self.undisturbed is None:
            return None
        return 100 * (self.accuracy - self.undisturbed)


def ends(job: Job, done: Mapping[int, WorkerOutcome]) -> list[str]:
    """Returns the problems of a training's end: workers that did not reach the last step, or replicas that differ.

    Args:
        job: what was trained.
        done: outcomes of the workers that reached the end, by rank.
    """
    problems = []
    policy = consistency(job.full_design().consistency)
    steps = 0 if job.seconds else job.recipe().steps
    behind = [outcome for outcome in done.values() if outcome.steps < steps]
    if policy.quorum(job.workers) < job.workers and len(behind) < len(done):
        behind = []  # one that was late goes on from the newest version, and takes a step less than the others
    if not done:
        problems.append("nobody reached the end")
    problems += [f"worker {each.rank} ended after {each.steps} of {steps} steps" for each in behind]
    digests = {outcome.weights for outcome in done.values()}
    if len(digests) > 1 and policy.replicas_end_equal:
        problems.append(f"the workers ended with {len(digests)} different models")
    losses = [outcome.train_loss for outcome in done.values()]
    if not all(isinstance(loss, UnsetType) or math.isfinite(loss) for loss in losses):
        problems.append("the loss is not finite")
    return problems


def with_problem(outcome: Outcome, problem: str) -> Outcome:
    """Returns the outcome with one more problem."""
    return msgspec.structs.replace(outcome, problems=[*outcome.problems, problem])
