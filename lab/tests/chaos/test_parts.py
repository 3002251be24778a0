"""Drawing storms by seed, the problems of a training's end, and the times of returns."""

from __future__ import annotations

import math

from msgspec import UNSET

from lab.tests.jobs.outcomes import worker_outcome
from thinwire.runtime.journal import Joined, Took
from thinwire_lab.chaos.audit import Returns
from thinwire_lab.chaos.faults import DURATIONS_S, KINDS, draw
from thinwire_lab.chaos.trials import ends
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome


def test_storm_is_a_function_of_its_seed() -> None:
    kinds = list(KINDS)
    storm = draw("1/2", kinds, workers=3, every=10, rounds=900)
    assert storm == draw("1/2", kinds, workers=3, every=10, rounds=900)
    assert storm != draw("1/3", kinds, workers=3, every=10, rounds=900)
    assert [fault.round for fault in storm] == list(range(10, 751, 10)), "the last sixth has no faults"
    assert {fault.kind for fault in storm} == set(kinds) and {fault.rank for fault in storm} == {0, 1, 2}
    for fault in storm:
        least, most = DURATIONS_S.get(fault.kind, (0.0, 4.0))
        assert least <= fault.seconds <= most, fault


JOB = Job(design="fp32", workers=2, steps=5)


def done(*workers: WorkerOutcome) -> dict[int, WorkerOutcome]:
    return {each.rank: each for each in workers}


def test_end_names_workers_that_stopped_early() -> None:
    assert ends(JOB, {}) == ["no worker reached the end"]
    assert ends(JOB, done(worker_outcome(0), worker_outcome(1))) == []
    behind = done(worker_outcome(0), worker_outcome(1, steps=4))
    assert ends(JOB, behind) == ["worker 1 ended after 4 of 5 steps"]
    assert ends(Job(design="fp32", workers=2, seconds=9.0), behind) == [], "a run of some seconds has no last step"


def test_end_with_backup_workers_allows_some_late_workers_but_not_all() -> None:
    job = Job(design="fp32", workers=2, steps=5, consistency="backup[1]")
    assert ends(job, done(worker_outcome(0), worker_outcome(1, steps=4))) == []
    all_late = done(worker_outcome(0, steps=4), worker_outcome(1, steps=4))
    assert ends(job, all_late) == ["worker 0 ended after 4 of 5 steps", "worker 1 ended after 4 of 5 steps"]


def test_end_reports_differing_replicas_unless_the_policy_allows_them() -> None:
    differing = done(worker_outcome(0), worker_outcome(1, weights="xyz"))
    assert ends(JOB, differing) == ["the workers ended with 2 different models"]
    assert ends(Job(design="fp32", workers=2, steps=5, consistency="asp"), differing) == []


def test_end_reports_a_loss_that_is_not_finite() -> None:
    assert ends(JOB, done(worker_outcome(0, train_loss=math.nan))) == ["the loss is not finite"]
    assert ends(JOB, done(worker_outcome(0, train_loss=UNSET))) == [], "a late worker may have taken no step"


def took(rank: int, at: float) -> Took:
    return Took(at=at, rank=rank, step=0, tables=(0,))


def test_returns_count_from_a_freezes_end_and_from_a_death() -> None:
    seen = Returns()
    seen.strike(0, at=10.0, lasts=True)
    seen.read(took(0, at=11.0))
    assert seen.waiting, "a gradient under way before the fault is no return"
    seen.lift(0, at=14.0)
    seen.read(took(0, at=14.5))
    assert (seen.waiting, seen.back, seen.joining) == ({}, [0.5], [])
    seen.strike(1, at=20.0, dies=True)
    for entry in (took(1, at=20.1), Joined(at=26.0, rank=1), took(0, at=27.0), took(1, at=28.0), took(1, at=29.0)):
        seen.read(entry)
    assert (seen.waiting, seen.back, seen.joining) == ({}, [0.5, 8.0], [2.0])
    seen.strike(2, at=30.0, for_good=True)
    assert seen.waiting == {}
