"""Counters are plain sums."""

from __future__ import annotations

from thinwire.telemetry import WARM_UP_STEPS, Counters, WarmUp


def test_sums_by_name() -> None:
    counters = Counters()
    counters.add("wire_bytes_push", 10)
    counters.add("wire_bytes_push", 5)
    counters.add("seconds", 0.5)
    assert counters["wire_bytes_push"] == 15
    assert counters.snapshot() == {"wire_bytes_push": 15, "seconds": 0.5}


def test_whole_numbers_stay_whole() -> None:
    counters = Counters()
    counters.add("bytes", 2**60)
    counters.add("bytes", 1)
    assert counters["bytes"] == 2**60 + 1


def test_asking_creates_nothing() -> None:
    counters = Counters()
    assert counters["never"] == 0
    assert counters.snapshot() == {}


def test_a_snapshot_is_a_copy() -> None:
    counters = Counters()
    counters.add("bytes", 1)
    snapshot = counters.snapshot()
    counters.add("bytes", 1)
    assert snapshot == {"bytes": 1}


def test_sums_since_the_first_steps() -> None:
    """The first step takes 100, every other 1; at most half of the steps are left out, and never more than five."""
    warm_up, sums = WarmUp(), 0.0
    assert warm_up.split(0, {"seconds": 7.0}) == (0, {}), "what comes before the first step belongs to none"
    for steps, left_out in ((1, 1), (2, 1), (3, 1), (4, 2), (9, 4), (10, 5), (30, 5)):
        while sums < 99 + steps:
            sums += 1 if sums else 100
            warm_up.note(int(sums) - 99, {"seconds": sums})
            warm_up.note(int(sums) - 99, {"seconds": 0.0})
        assert warm_up.split(steps, {"seconds": sums}) == (left_out, {"seconds": steps - left_out}), steps
    assert warm_up.over and len(warm_up._after) == WARM_UP_STEPS
    late = WarmUp()
    late.note(3, {"seconds": 9.0})
    assert late.split(20, {"seconds": 12.0}) == (0, {"seconds": 12.0}), "nobody noted the first"
