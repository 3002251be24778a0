"""Counters are plain sums, and a warm-up is separate from the steps after it."""

from __future__ import annotations

from thinwire.telemetry import WARM_UP_STEPS, Counters, WarmUp


def test_counters_add_whole_numbers_exactly_and_a_snapshot_is_a_copy() -> None:
    counters = Counters()
    counters.add("bytes", 2**60)
    snapshot = counters.snapshot()
    counters.add("bytes", 1)
    assert (counters["bytes"], counters["never asked for"]) == (2**60 + 1, 0)
    assert (snapshot, counters.snapshot()) == ({"bytes": 2**60}, {"bytes": 2**60 + 1})


def test_a_warm_up_is_half_of_the_steps_and_never_more_than_five() -> None:
    """The first step takes 100, every other 1."""
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
    assert late.split(20, {"seconds": 12.0}) == (0, {"seconds": 12.0}), "the first was not noted"
