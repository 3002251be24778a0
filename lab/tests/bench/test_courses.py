"""The rates of links during a run: sweeps, rates by the clock, and their names."""

import pytest

from thinwire.errors import ConfigError
from thinwire.transports.links import Rate
from thinwire_lab.bench.cells import HookCell
from thinwire_lab.bench.courses import Stepping, Sweep, course

FAST, SLOW = Rate(100_000_000), Rate(10_000_000)


def steps_at(sweep: Sweep, seconds: dict[Rate, list[float]]) -> list[float]:
    """Takes steps of known seconds, over and over again by rate, until the sweep has ended; returns when each ended."""
    elapsed: list[float] = []
    taken = 0
    rate = sweep.rate(0.0, elapsed)
    while rate is not None:
        own = seconds[rate]
        elapsed.append((elapsed or [0.0])[-1] + own[taken % len(own)])
        now = sweep.rate(elapsed[-1], elapsed)
        taken = taken + 1 if now == rate else 0
        rate = now
    return elapsed


def test_sweep_leaves_out_steps_under_way_and_ends() -> None:
    sweep = Sweep([FAST, SLOW], seconds=2.0, most=10)
    # The first step at a rate still has messages of the rate before.
    elapsed = steps_at(sweep, {FAST: [9.0, 0.1, *[0.05] * 10], SLOW: [0.05, 7.0]})
    assert sweep.step_s == pytest.approx([0.1, 7.0]), "of a rate too slow for its time, one whole step is enough"
    assert len(elapsed) == 4
    sweep = Sweep([FAST, SLOW], seconds=30.0, most=10)
    elapsed = steps_at(sweep, {FAST: [9.0, 0.1, *[0.05] * 10], SLOW: [9.0, 9.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]})
    assert sweep.step_s == pytest.approx([0.05, 2.0]) and len(elapsed) == 12 + 8


def test_sweep_leaves_out_exchanges_of_adaptation() -> None:
    sweep = Sweep([FAST, SLOW], seconds=1.0, most=4, settle=5)
    steps_at(sweep, {FAST: [*[2.0] * 4, *[0.1] * 9], SLOW: [*[4.0] * 4, 0.5]})
    assert sweep.step_s == pytest.approx([0.1, 0.5])


def test_sweep_of_local_updates_counts_whole_periods() -> None:
    sweep = Sweep([FAST], seconds=100.0, most=3, period=4)
    elapsed = steps_at(sweep, {FAST: [0.1, 0.1, 0.1, 1.7]})
    assert sweep.step_s == pytest.approx([0.5]) and len(elapsed) == 4 * (2 + 3)


def test_stepping_rates_repeat_until_the_end() -> None:
    made = course("100mbit/10mbit@60", limit_s=300.0)
    assert made == Stepping((FAST, SLOW), 60.0, 300.0)
    assert [made.rate(now_s, [1.0]) for now_s in (0.0, 60.0, 119.0, 120.0)] == [FAST, SLOW, SLOW, FAST]
    assert made.rate(5.0, [1.0, 301.0]) is None
    assert course(None) == Stepping((Rate(None),)) and course("10mbit", 5.0).rate(9.0, [4.0, 6.0]) is None


def test_limit_ends_local_updates_after_whole_periods() -> None:
    for link in ("10mbit", "100mbit/10mbit@60"):
        made = course(link, limit_s=5.0, period=3)
        # The exchange is in the third step: what ended after the fourth would count one in four steps.
        assert [made.rate(9.0, [1.0, 2.0, 4.0, 6.0, 7.0, 9.0][:taken]) is None for taken in range(7)] == [
            *[False] * 6,
            True,
        ], link


def test_course_impossible_links_raise_config_error() -> None:
    for link, complaint in (
        ("100mbit/10mbit", "after @ come the seconds"),
        ("100mbit/none@60", "needs a limit in each"),
        ("100mbit/10mbit@0", "above 0"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            HookCell(hook="none", link=link)
