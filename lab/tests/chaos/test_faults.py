"""Storms are drawn from their seeds, and strike who is there."""

from __future__ import annotations

from thinwire_lab.chaos.faults import DURATIONS_S, KINDS, draw


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
