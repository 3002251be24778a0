"""Times of faults: from whom they are heard, and from when on they count."""

from __future__ import annotations

from thinwire.runtime.journal import Joined, Took
from thinwire_lab.chaos.witnesses import Witnesses

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
