"""Storms are drawn from their seeds; what is wrong with how a training ended; from when on times of faults count."""

from __future__ import annotations

import math

from msgspec import UNSET

from lab.tests.jobs.outcomes import worker_outcome
from thinwire.runtime.journal import Joined, Took
from thinwire_lab.chaos.faults import DURATIONS_S, KINDS, draw
from thinwire_lab.chaos.outcome import ends
from thinwire_lab.chaos.witnesses import Witnesses
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome


def test_a_seed_is_a_storm() -> None:
    kinds = list(KINDS)
    storm = draw("1/2", kinds, workers=3, every=10, rounds=900)
    assert storm == draw("1/2", kinds, workers=3, every=10, rounds=900)
    assert storm != draw("1/3", kinds, workers=3, every=10, rounds=900)
    assert [fault.round for fault in storm] == list(range(10, 751, 10)), "the last sixth is left in peace"
    assert {fault.kind for fault in storm} == set(kinds) and {fault.rank for fault in storm} == {0, 1, 2}
    for fault in storm:
        least, most = DURATIONS_S.get(fault.kind, (0.0, 4.0))
        assert least <= fault.seconds <= most, fault


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


SAID = "warning: worker 1 lost its connection at step 7; the others wait for it"


def took(rank: int, at: float) -> Took:
    return Took(at=at, rank=rank, step=0, tables=(0,))


def test_each_witness_counts_once_for_each_death() -> None:
    seen = Witnesses()
    seen.hear(0, SAID, at=1.0)
    assert seen.said == [], "nobody was struck yet: that is another matter"
    for death in (10.0, 20.0):
        seen.strike(1, at=death)
        for witness in (0, 2, 0):
            seen.hear(witness, SAID, at=death + 1 + witness)
        seen.hear(2, "warning: worker 0 went away at step 3", at=death + 5)
    assert seen.said == [1.0, 3.0, 1.0, 3.0]


def test_who_is_frozen_is_back_after_the_fault_and_who_died_after_its_death() -> None:
    seen = Witnesses()
    seen.strike(0, at=10.0, lasts=True)
    seen.read(took(0, at=11.0))
    assert seen.waiting, "what was on its way is no sign of life"
    seen.lift(0, at=14.0)
    seen.read(took(0, at=14.5))
    assert (seen.waiting, seen.back, seen.joining) == ({}, [0.5], [])
    seen.strike(1, at=20.0, dies=True)
    for entry in (took(1, at=20.1), Joined(at=26.0, rank=1), took(0, at=27.0), took(1, at=28.0), took(1, at=29.0)):
        seen.read(entry)
    assert (seen.waiting, seen.back, seen.joining) == ({}, [0.5, 8.0], [2.0])
    seen.strike(2, at=30.0, for_good=True)
    assert seen.waiting == {}
