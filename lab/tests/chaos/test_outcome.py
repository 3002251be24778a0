"""What is wrong with how a training ended."""

from __future__ import annotations

import math

from msgspec import UNSET

from lab.tests.jobs.outcomes import worker_outcome
from thinwire_lab.chaos.outcome import ends
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome

JOB = Job(design="fp32", workers=2, steps=5)


def done(*workers: WorkerOutcome) -> dict[int, WorkerOutcome]:
    return {each.rank: each for each in workers}


def test_who_did_not_reach_the_last_step_is_named() -> None:
    assert ends(JOB, {}) == ["nobody reached the end"]
    assert ends(JOB, done(worker_outcome(0), worker_outcome(1))) == []
    behind = done(worker_outcome(0), worker_outcome(1, steps=4))
    assert ends(JOB, behind) == ["worker 1 ended after 4 of 5 steps"]
    assert ends(Job(design="fp32", workers=2, seconds=9.0), behind) == [], "by the clock no number of steps is right"


def test_with_backups_some_may_be_late_and_not_all() -> None:
    job = Job(design="fp32", workers=2, steps=5, consistency="backup[1]")
    assert ends(job, done(worker_outcome(0), worker_outcome(1, steps=4))) == []
    all_late = done(worker_outcome(0, steps=4), worker_outcome(1, steps=4))
    assert ends(job, all_late) == ["worker 0 ended after 4 of 5 steps", "worker 1 ended after 4 of 5 steps"]


def test_replicas_differ_only_where_the_policy_lets_them() -> None:
    differing = done(worker_outcome(0), worker_outcome(1, weights="xyz"))
    assert ends(JOB, differing) == ["the workers ended with 2 different models"]
    assert ends(Job(design="fp32", workers=2, steps=5, consistency="asp"), differing) == []


def test_losses_are_finite_where_there_are_any() -> None:
    assert ends(JOB, done(worker_outcome(0, train_loss=math.nan))) == ["the loss is not finite"]
    assert ends(JOB, done(worker_outcome(0, train_loss=UNSET))) == [], "one that came late has taken no step"
